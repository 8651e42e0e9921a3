"""Who may call a service, and what: credentials of callers, the roles' table, TLS, and the gate in front of every call.

Owns the file of tokens and certificates and its reload; the frozen Caller that a call comes from; the one table of RPCs and
roles; TLS credentials and their reload; the gate, which lets a call in or refuses it before its handler runs and before its
message is read; and the settings of all that. May import kvkeeper.common.service, grpc, prometheus_client and structlog; no service.
caller.py, roles.py and settings.py import no grpc.
"""
