"""Leases of sessions, their epochs, and steps that take effect exactly once.

Owns which sessions may call, until when, and the answer to each one's last step. Rules: epochs strictly increase, and a call
with another epoch than its session's is refused; only messages renew a lease; a step id is applied once, and its repeat gets
the same bytes back; a session that ended never returns. Time comes in as seconds of any monotone clock. Does not know pools
or the wire.
"""

from dataclasses import dataclass
from enum import Enum

from ..core.values.errors import InvalidField, OutOfSessions, StaleEpoch, StepConflict, StepGap, UnknownSession, WrongMode
from ..core.values.types import Executor, SessionId

GRACE_SECONDS = 0.5
MOST_STEPS_IN_FLIGHT = 2


class SessionMode(Enum):
    """How a session changes sequences; its first call that changes one fixes it."""

    STEPS = "steps"
    ONE_ITEM = "one-item"


@dataclass(slots=True)
class Session:
    """One engine's lease and its last step. step_id is the last one applied, 0 before the first."""

    id: SessionId
    epoch: int
    executor: Executor
    ttl: float
    client_name: str
    deadline: float
    caller: str = ""  # that it counts for: a tenant or a connection; empty where callers cannot be distinguished
    step_id: int = 0
    completed_step_id: int = 0
    mode: SessionMode | None = None
    last_request: bytes = b""
    last_reply: bytes = b""
    grace_deadline: float | None = None

    def use_mode(self, mode: SessionMode) -> None:
        """Raises WrongMode when the session has been used the other way."""
        if self.mode is None:
            self.mode = mode
        elif self.mode is not mode:
            raise WrongMode(f"this session uses {self.mode.value} calls", mode=self.mode.value)

    def find_repeat(self, step_id: int, request: bytes) -> bytes | None:
        """The recorded reply when this is the last step again, None when it is the next one.

        Raises StepConflict for the last id with other contents, StepGap for any other id.
        """
        expected = self.step_id + 1
        if step_id == expected:
            return None
        if step_id == self.step_id > 0:
            if request == self.last_request:
                return self.last_reply
            raise StepConflict(f"step {step_id} was already applied with other contents", expected_step_id=expected)
        raise StepGap(f"step {step_id} is not the next step, {expected}", expected_step_id=expected)

    def check_completed(self, step_id: int, completed_step_id: int) -> None:
        """Raises InvalidField where the completed step is not a past step, or too many steps would be in flight."""
        # A completion that RenewSession reported is no lower bound: a lost step is sent again with the same bytes.
        least = max(step_id - MOST_STEPS_IN_FLIGHT, 0)
        if self.executor is Executor.CACHE:
            least = step_id - 1
        if not least <= completed_step_id <= step_id - 1:
            raise InvalidField(
                f"completed_step_id of step {step_id} is {least} to {step_id - 1}", field="completed_step_id", limit=least
            )

    def record(self, step_id: int, completed_step_id: int, request: bytes, reply: bytes) -> None:
        """The step was applied. To be called before anything is awaited, so that state and reply change together."""
        self.step_id, self.completed_step_id = step_id, max(self.completed_step_id, completed_step_id)
        self.last_request, self.last_reply = request, reply

    def check_complete(self, completed_step_id: int) -> None:
        """Raises InvalidField for a completion past the last step."""
        if not 0 <= completed_step_id <= self.step_id:
            raise InvalidField(f"completed_step_id is at most {self.step_id}", field="completed_step_id", limit=self.step_id)

    def complete(self, completed_step_id: int) -> None:
        """A completion came without a step. Raises InvalidField for one past the last step."""
        self.check_complete(completed_step_id)
        self.completed_step_id = max(self.completed_step_id, completed_step_id)


class SessionTable:
    """All live sessions. The caller asks which have expired; nothing is timed here."""

    def __init__(self, epoch: int, max_sessions: int) -> None:
        """epoch: of this run of the service; larger than any of an earlier run."""
        self.epoch = self._first_epoch = epoch
        self._max_sessions = max_sessions
        self._sessions: dict[SessionId, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def live(self) -> list[Session]:
        return list(self._sessions.values())

    def check_room(self, caller: str = "") -> None:
        """Raises OutOfSessions where no session slot is left. A caller leaves a tenth of them to others."""
        if len(self._sessions) >= self._max_sessions:
            raise OutOfSessions(f"all {self._max_sessions} sessions are in use", limit=self._max_sessions)
        share = self._max_sessions - self._max_sessions // 10
        if caller and sum(session.caller == caller for session in self._sessions.values()) >= share:
            raise OutOfSessions(f"{share} sessions of this caller are open, the most that one may have", limit=share)

    def open(
        self, session_id: SessionId, executor: Executor, ttl: float, client_name: str, now: float, caller: str = ""
    ) -> Session:
        """Each session gets an epoch of its own. Raises OutOfSessions."""
        self.check_room(caller)
        assert session_id not in self._sessions, "a session id is drawn once"
        self.epoch += 1
        session = Session(session_id, self.epoch, executor, ttl, client_name, now + ttl, caller)
        self._sessions[session_id] = session
        return session

    def require(self, session_id: str, epoch: int, now: float) -> Session:
        """The live session of this id and epoch. Does not renew. Raises UnknownSession or StaleEpoch."""
        session = self._sessions.get(SessionId(session_id))
        if session is None and epoch <= self._first_epoch:
            raise StaleEpoch("no session of this run of the service has this epoch", current_epoch=self.epoch)
        if session is None or self._has_expired(session, now):
            raise UnknownSession("no live session has this id; open another")
        if epoch != session.epoch:
            raise StaleEpoch("the session has another epoch", current_epoch=self.epoch)
        return session

    def renew(self, session: Session, now: float) -> None:
        """A message of the session came: the lease starts anew, and a grace ends."""
        session.deadline = now + session.ttl
        session.grace_deadline = None

    def start_grace(self, session: Session, now: float, grace: float = GRACE_SECONDS) -> None:
        """The session's stream ended without CloseSession: the session has `grace` seconds to send a message."""
        session.grace_deadline = now + grace

    def end_session(self, session: Session) -> None:
        """Removes the session; its id never comes back."""
        self._sessions.pop(session.id, None)

    def expired(self, now: float) -> list[Session]:
        """Sessions whose lease or grace ran out; they are still listed until end_session is called."""
        return [session for session in self._sessions.values() if self._has_expired(session, now)]

    def next_deadline(self) -> float | None:
        """When the next session expires if no message renews it; None without sessions."""
        return min((_deadline(session) for session in self._sessions.values()), default=None)

    def _has_expired(self, session: Session, now: float) -> bool:
        return now >= _deadline(session)


def _deadline(session: Session) -> float:
    if session.grace_deadline is None:
        return session.deadline
    return min(session.deadline, session.grace_deadline)
