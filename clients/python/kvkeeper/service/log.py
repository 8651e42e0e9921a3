"""A service's log: structlog, one JSON object a line, on stderr.

Events are short names with fields. Never in a log: attach tokens, descriptors, prompts, outputs, tenants.
"""

import logging
import sys

import structlog


def configure(level: str) -> None:
    """For the process as a whole, so only the service's main calls it."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def warn_of_tracing(message: str) -> None:
    """What an exporter has to say."""
    structlog.get_logger().warning("tracing", message=message)
