"""A race: contestants of one task, checked, timed in turns, and entered into pytest-benchmark."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from tqdm import tqdm

from .timing import paired_ratio, take_turns


def nothing_to_check() -> None:
    """Of a contestant that is the definition, or has no result."""


@dataclass
class Contestant:
    """`against` names the denominators of its ratios; `check` raises if its result is wrong."""

    run: Callable[[], object]
    against: tuple[str, ...] = ()
    check: Callable[[], None] = nothing_to_check
    own_clock: bool = False  # run returns the seconds
    facts: dict = field(default_factory=dict)


@dataclass
class Race:
    """Contestants that `entered`, and whom they are measured against, take turns once, when the
    first of them is asked for."""

    kind: str
    at: dict  # what all of them have in common: sizes, names
    contestants: dict[str, Contestant]
    rounds: int
    seconds: float
    entered: list[str]
    progress: Callable[[range], Iterable[int]]
    turns: dict | None = None
    absent: dict[str, str] = field(default_factory=dict)  # and why
    wrong: dict[str, Exception] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        request,
        kind: str,
        at: dict,
        listed: dict[str, Contestant | str],
        share: float = 1.0,
    ) -> "Race":
        """In the fixture `race` of a module: of the providers whose tests were picked; a text is
        the reason why one cannot take part. `share` of the usual time is given to each."""
        absent = {name: each for name, each in listed.items() if isinstance(each, str)}
        contestants = {name: each for name, each in listed.items() if name not in absent}
        quick = request.config.getoption("set") == "quick"
        rounds = request.config.getoption("rounds") or (9 if quick else 13)
        seconds = share * 6
        entered = [name for name in picked(request) if name in contestants]
        bar = _bar(request.config)
        return cls(kind, at, contestants, rounds, seconds, entered, bar, absent=absent)

    @property
    def group(self) -> str:
        return " ".join([self.kind, *(f"{name}={value}" for name, value in self.at.items())])

    def _everybody(self) -> list[str]:
        """In the order in which they are listed."""
        wanted = {*self.entered}
        for name in self.entered:
            wanted.update(self.contestants[name].against)
        return [name for name in self.contestants if name in wanted]

    def _run(self, timed: bool) -> None:
        running = {}
        for name in self._everybody():
            try:
                self.contestants[name].check()
            except Exception as error:
                self.wrong[name] = error
            else:
                running[name] = self.contestants[name].run
        clocks = {name for name, each in self.contestants.items() if each.own_clock}
        self.turns = {}
        if timed and running:
            try:
                self.turns = take_turns(running, self.rounds, self.seconds, self.progress, clocks)
            except Exception as error:
                self.wrong |= dict.fromkeys(running, error)

    def report(self, name: str, benchmark) -> None:
        """Enter the turns of a contestant, and their ratios to the turns of others."""
        if name not in self.contestants:
            benchmark.skipped = True
            pytest.skip(self.absent.get(name, f"{name} has no part in {self.group}"))
        if self.turns is None:
            self._run(timed=benchmark.enabled)
        contestant = self.contestants[name]
        for needed in (name, *contestant.against):
            if needed in self.wrong:
                benchmark.skipped = True
                raise AssertionError(f"{needed} is not timed") from self.wrong[needed]
        facts = {"at": self.at} | contestant.facts
        own = self.turns.get(name, {})
        if benchmark.enabled:
            turns = {other: self.turns[other] for other in contestant.against}
            facts["ratios"] = {other: paired_ratio(own, turns[other]) for other in turns}
            facts["turns"] = list(own)
        enter(benchmark, self.group, own.values(), kind=self.kind, provider=name, **facts)


def picked(request) -> list[str]:
    """The providers in this race whose tests were picked, from within its fixture."""
    tests = [item for item in request.session.items if item.path == request.path]
    every = [item.callspec.params for item in tests]
    return [each["provider"] for each in every if each["race"] == request.param]


def enter(benchmark, group: str, seconds: Iterable[float], **facts) -> None:
    """Into pytest-benchmark's tables and JSON, as if it had taken the time itself."""
    benchmark.group = group
    benchmark.extra_info |= facts
    benchmark._mode = "race"  # it counts as used
    if benchmark.enabled:
        stats = benchmark._make_stats(iterations=1)
        for each in seconds:
            stats.update(each)


def _bar(config) -> Callable[[range], Iterable[int]]:
    """Goes along the rounds with a progress bar, where a person looks on."""
    capture = config.pluginmanager.getplugin("capturemanager")

    def along(rounds: range) -> Iterable[int]:
        with capture.global_and_fixture_disabled():
            yield from tqdm(rounds, "rounds", leave=False, disable=None)

    return along
