"""What was reached, said in sentences that are computed from the result lines."""

from collections.abc import Mapping

import numpy as np

from . import paper
from .lines import Lines, accuracies, attacked, cells, curves, delta_max, depth_of, means, paired

PLAIN = "GCN"


def verdicts(studies: Mapping[str, Lines]) -> str:
    """A list with an item for every question that the lines can answer."""
    found = [
        *_against_the_paper(studies["accuracy"]),
        *_delta_max(studies["accuracy"]),
        *_against_final(studies["accuracy"]),
        *_depth(studies["depth"]),
        *_attack("the public poisoned graphs", studies["attack"]),
        *_attack("the graphs poisoned here", studies["fresh-attack"]),
    ]
    return "\n".join(f"- {each}" for each in found)


def _against_the_paper(lines: Lines) -> list[str]:
    """Every cell of our default and the paper's MetSelect."""
    gaps, behind = [], []
    for (backbone, selector, dataset), some in cells(lines).items():
        theirs = paper.ACCURACY[backbone]["metselect"][dataset]
        if selector != "metselect":
            continue
        gaps.append(accuracies(some).mean() - theirs.mean)
        if gaps[-1] < -(theirs.std or 0) / 10**0.5:
            behind.append(f"{backbone.upper()} on {dataset} ({gaps[-1]:+.1f})")
    if not gaps:
        return []
    return [
        f"Our MetSelect is at least the paper's minus one standard error in "
        f"{len(gaps) - len(behind)} of {len(gaps)} cells of Table 2"
        + (f" (not: {', '.join(behind)})" if behind else "")
        + f"; on average they differ by {np.mean(gaps):+.1f} points."
    ]


def _delta_max(lines: Lines) -> list[str]:
    said = []
    for backbone in paper.ACCURACY:
        ours = delta_max(means(lines, backbone))
        if "metselect" in ours:
            theirs = paper.DELTA_MAX[backbone]["metselect"]
            said.append(f"{ours['metselect']:.2f} {backbone.upper()} (paper {theirs:.2f})")
    return [f"Its Δ max over the datasets run: {', '.join(said)}."] if said else []


def _against_final(lines: Lines) -> list[str]:
    found, above, below, level = cells(lines), [], [], 0
    for (backbone, selector, dataset), some in found.items():
        final = found.get((backbone, "final", dataset))
        if selector != "metselect" or not final:
            continue
        gap, error = paired(some, final)
        if not np.isfinite(error):  # one run cannot tell
            continue
        text = f"{backbone.upper()} on {dataset} ({gap:+.1f}, standard error {error:.1f})"
        if gap > 2 * error:
            above.append(text)
        elif gap < -2 * error:
            below.append(text)
        else:
            level += 1
    if not above and not below and not level:
        return []
    return [
        f"Against FinalSelect of the same backbone, two standard errors, paired: above in "
        f"{len(above)} cells, level in {level}, below in {len(below)}"
        + (f": {'; '.join(below)}." if below else ".")
    ]


def _depth(lines: Lines) -> list[str]:
    said = []
    for dataset in dict.fromkeys(each["dataset"] for each in lines):
        every = curves([each for each in lines if each["dataset"] == dataset], depth_of)
        for name, points in every.items():
            best = max(points, key=lambda at: points[at].mean())
            values = {at: points[at].mean() for at in points}
            lost = ", ".join(
                f"{values[best] - values[at]:.1f} at {at}"
                for at in (16, 32, 64, 128)
                if at in values
            )
            said.append(
                f"{dataset}, {name}: best {values[best]:.1f} at depth {best}; points lost: {lost}."
            )
    return said


def _attack(where: str, lines: Lines) -> list[str]:
    said = []
    for base in dict.fromkeys(attacked(each)[0] for each in lines):
        some = [each for each in lines if attacked(each)[0] == base]
        every = curves(some, lambda each: attacked(each)[1])
        plain = every.pop(PLAIN, None)
        if plain is None:
            continue
        most = max(plain)
        said += [
            f"Mettack on {base}, {where}, {name} against the plain GCN: "
            + ", ".join(f"{(points[at] - plain[at]).mean():+.1f} at {at} %" for at in (0, most))
            + "."
            for name, points in every.items()
        ]
    return said
