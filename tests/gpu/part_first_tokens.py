"""Part q: a first token through both services, as early as can be, because all else stands on it; see part_serving."""

from tests.gpu.part_serving import run_first_tokens as run

__all__ = ["run"]
