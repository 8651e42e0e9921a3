"""What the reference model makes of hints: whose word counts. Everything is looked up in lists of all that was said."""

from dataclasses import dataclass, field

from kvkeeper.cache_service.core.blocks.hint_record import JUDGED_SPAN, LEAST_ENDED, MOST_ALIKE, MOST_WRONG, SPAN, TURNOVERS
from kvkeeper.cache_service.core.values.types import ReuseHint

Key = tuple[str, tuple[int, ...]]  # scope, every token up to the end of the block


def tenant_of(scope: str) -> str:
    """Quotas and clearing are by tenant, sharing by scope."""
    return scope.partition("\0")[0]


@dataclass
class NaiveEnd:
    """An end of a prefix of which a hint was given for so long, watched since so many blocks had been published."""

    key: Key
    hint: ReuseHint
    number: int
    seconds: float
    until: float


@dataclass
class NaiveHints:
    """The hints of one pool. The tenant None is all of them."""

    num_blocks: int
    num_published: int = 0
    num_ignored: int = 0  # hints that told nothing apart
    num_distrusted: int = 0
    said: dict[str | None, list[ReuseHint]] = field(default_factory=dict)
    came_true: dict[tuple[str, ReuseHint], list[bool]] = field(default_factory=dict)
    ends: list[NaiveEnd] = field(default_factory=list)

    def note_end(self, tenant: str, hint: ReuseHint) -> bool:
        """Whether the end of a sequence is told apart by what it says."""
        common = [self._is_common(self.said.setdefault(whose, []), hint) for whose in (None, tenant)]
        for whose in (None, tenant):
            self.said[whose].append(hint)
        self.num_ignored += all(common) and hint is not ReuseHint.UNSPECIFIED
        return not all(common)

    def _is_common(self, said: list[ReuseHint], hint: ReuseHint) -> bool:
        share = 0.0
        for number, each in enumerate(said, 1):
            share += ((each is hint) - share) / min(number, SPAN)
        return len(said) >= LEAST_ENDED and share > MOST_ALIKE

    def is_trusted(self, tenant: str, hint: ReuseHint) -> bool:
        wrong = 0.0
        for is_right in self.came_true.get((tenant, hint), ()):
            wrong += ((not is_right) - wrong) / JUDGED_SPAN
        self.num_distrusted += wrong > MOST_WRONG
        return wrong <= MOST_WRONG

    def watch(self, key: Key, hint: ReuseHint, seconds: float, now: float) -> None:
        """A hint of an end that nothing else holds."""
        for end in [end for end in self.ends if end.number <= self.num_published - TURNOVERS * self.num_blocks]:
            if end.seconds and end.until > now:
                end.number = self.num_published
            else:
                self._judge(end, went_on=False)
        same = [end for end in self.ends if end.key == key]
        if same and same[0].hint is hint and same[0].seconds >= seconds:
            return
        self.ends = [end for end in self.ends if end.key != key]
        if hint is not ReuseHint.UNSPECIFIED:
            self.ends.append(NaiveEnd(key, hint, self.num_published, seconds, now + seconds))

    def note_path(self, keys: list[Key]) -> None:
        for end in [end for end in self.ends if end.key in keys]:
            self._judge(end, went_on=True)

    def _judge(self, end: NaiveEnd, *, went_on: bool) -> None:
        self.ends.remove(end)
        self.came_true.setdefault((tenant_of(end.key[0]), end.hint), []).append(went_on is (end.hint is ReuseHint.SOON))
