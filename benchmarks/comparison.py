"""Interleaved comparison of the implementations of one task: check their results, time them round
by round, and enter times and ratios into pytest-benchmark."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from tqdm import tqdm

from .interleaved_timing import paired_ratio, time_interleaved


def no_check() -> None:
    """The check of an implementation that defines the result, or has none."""


@dataclass
class Implementation:
    """One way to do the task. `against` names the denominators of its ratios; `check` raises if its
    result is wrong; `extra` is stored beside its times."""

    run: Callable[[], object]
    against: tuple[str, ...] = ()
    check: Callable[[], None] = no_check
    self_timed: bool = False  # run returns the seconds
    extra: dict = field(default_factory=dict)


@dataclass
class Comparison:
    """Implementations of one task. The `selected` ones and their denominators are checked and timed
    together when the first result is asked for."""

    kind: str
    parameters: dict  # common to all implementations: sizes, names
    implementations: dict[str, Implementation]
    rounds: int
    seconds: float
    selected: list[str]
    progress: Callable[[range], Iterable[int]]
    times: dict | None = None
    unavailable: dict[str, str] = field(default_factory=dict)  # name: reason
    errors: dict[str, Exception] = field(default_factory=dict)

    @classmethod
    def from_request(
        cls,
        request,
        kind: str,
        parameters: dict,
        listed: dict[str, Implementation | str],
        time_share: float = 1.0,
    ) -> "Comparison":
        """Build it in the fixture `comparison` of a module, for the providers whose tests were
        selected. A string in `listed` is the reason why that provider cannot run. Each gets
        `time_share` of the usual time."""
        available, unavailable = {}, {}
        for name, entry in listed.items():
            if isinstance(entry, str):
                unavailable[name] = entry
            else:
                available[name] = entry
        quick = request.config.getoption("set") == "quick"
        rounds = request.config.getoption("rounds") or (9 if quick else 13)
        selected = [name for name in selected_providers(request) if name in available]
        return cls(
            kind,
            parameters,
            available,
            rounds,
            6 * time_share,
            selected,
            _progress_bar(request.config),
            unavailable=unavailable,
        )

    @property
    def group(self) -> str:
        return " ".join([self.kind, *(f"{key}={value}" for key, value in self.parameters.items())])

    def _measure(self, timed: bool) -> None:
        needed = {*self.selected}
        for name in self.selected:
            needed.update(self.implementations[name].against)
        correct, self_timed = {}, set()
        for name, implementation in self.implementations.items():
            if name not in needed:
                continue
            try:
                implementation.check()
            except Exception as error:
                self.errors[name] = error
                continue
            correct[name] = implementation.run
            if implementation.self_timed:
                self_timed.add(name)
        self.times = {}
        if timed and correct:
            try:
                self.times = time_interleaved(
                    correct, self.rounds, self.seconds, self.progress, self_timed
                )
            except Exception as error:
                self.errors |= dict.fromkeys(correct, error)

    def report(self, name: str, benchmark) -> None:
        """Enter the times of an implementation and their ratios to its denominators."""
        if name not in self.implementations:
            benchmark.skipped = True
            pytest.skip(self.unavailable.get(name, f"{name} is not part of {self.group}"))
        if self.times is None:
            self._measure(timed=benchmark.enabled)
        implementation = self.implementations[name]
        for required in (name, *implementation.against):
            if required in self.errors:
                benchmark.skipped = True
                raise AssertionError(f"{required} is not timed") from self.errors[required]
        extra = {"at": self.parameters} | implementation.extra
        own = self.times.get(name, {})
        if benchmark.enabled:
            extra["ratios"] = {
                other: paired_ratio(own, self.times[other]) for other in implementation.against
            }
            extra["turns"] = list(own)  # the rounds in which it was measured
        enter(benchmark, self.group, own.values(), kind=self.kind, provider=name, **extra)


def selected_providers(request) -> list[str]:
    """Return the providers of this comparison whose tests were selected, from within its
    fixture."""
    providers = []
    for item in request.session.items:
        if item.path == request.path and item.callspec.params["comparison"] == request.param:
            providers.append(item.callspec.params["provider"])
    return providers


def enter(benchmark, group: str, seconds: Iterable[float], **extra) -> None:
    """Enter times into pytest-benchmark's tables and JSON as if it had measured them itself."""
    benchmark.group = group
    benchmark.extra_info |= extra
    benchmark._mode = "comparison"  # marks the fixture as used
    if benchmark.enabled:
        stats = benchmark._make_stats(iterations=1)
        for elapsed in seconds:
            stats.update(elapsed)


def _progress_bar(config) -> Callable[[range], Iterable[int]]:
    """Return an iterator over the rounds that shows a progress bar in a terminal."""
    capture = config.pluginmanager.getplugin("capturemanager")

    def iterate(rounds: range) -> Iterable[int]:
        with capture.global_and_fixture_disabled():
            yield from tqdm(rounds, "rounds", leave=False, disable=None)

    return iterate
