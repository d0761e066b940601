"""What does the graph of a transition look like to people?

Text only: a table, Mermaid and DOT. Edges of rule *release before acquire* are dashed and named by what is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nereus.transition.primitive import (
    Destroy,
    Extend,
    Merge,
    Park,
    Primitive,
    Replica,
    Split,
    TransitionDag,
    Unpark,
)

_HEADER = ("primitive", "what", "after", "waits for room from", "seconds")


def sentence(primitive: Primitive) -> str:
    """Return in words what ``primitive`` does."""
    match primitive:
        case Split(source=source, parts=parts):
            return f"{source} becomes {_several(parts)}"
        case Destroy(replica=replica):
            return f"drop {replica}"
        case Extend(sources=sources, target=target):
            return f"{_several(sources)} sent to {target}"
        case Merge(parts=parts, target=target, aligned=aligned):
            return f"{_several(parts)} becomes {target}" + ("" if aligned else ", reshuffled")
        case Park(replica=replica):
            return f"{replica} goes to host memory"
        case Unpark(source=source, target=target):
            return f"{source} comes back from host memory to {target}"


def table(dag: TransitionDag, seconds: Callable[[Primitive], float] | None = None) -> str:
    """Return one row a primitive, in an order in which they may run."""
    if not dag.primitives:
        return "nothing to do: both plans have the same replicas"
    ids = [primitive.id for primitive in dag.primitives]
    rows = [
        (
            primitive.id,
            sentence(primitive),
            ", ".join(ids[i] for i in dag.local[index]),
            ", ".join(ids[i] for i in dag.resource[index]),
            f"{seconds(primitive):.4g}" if seconds else "",
        )
        for index, primitive in enumerate(dag.primitives)
    ]
    columns = len(_HEADER) if seconds else len(_HEADER) - 1
    widths = [max(len(row[column]) for row in (_HEADER, *rows)) for column in range(columns)]
    rule = tuple("-" * width for width in widths)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row[:columns], widths, strict=True)).rstrip()
        for row in (_HEADER, rule, *rows)
    )


def mermaid(dag: TransitionDag) -> str:
    """Return the graph as a Mermaid flowchart."""
    lines = ["flowchart LR"]
    lines += [f'  n{i}["{primitive.id}<br>{sentence(primitive)}"]' for i, primitive in enumerate(dag.primitives)]
    lines += [f"  n{before} {'-.->' if room else '-->'} n{after}" for before, after, room in _edges(dag)]
    return "\n".join(lines)


def dot(dag: TransitionDag) -> str:
    """Return the graph in the DOT language of Graphviz."""
    lines = ["digraph transition {", "  rankdir=LR;", "  node [shape=box];"]
    lines += [f'  n{i} [label="{primitive.id}\\n{sentence(primitive)}"];' for i, primitive in enumerate(dag.primitives)]
    lines += [f"  n{before} -> n{after}{' [style=dashed]' if room else ''};" for before, after, room in _edges(dag)]
    return "\n".join([*lines, "}"])


def _edges(dag: TransitionDag) -> Iterator[tuple[int, int, bool]]:
    """Yield (before, after, whether for room)."""
    for after, (local, resource) in enumerate(zip(dag.local, dag.resource, strict=True)):
        yield from ((before, after, False) for before in local)
        yield from ((before, after, True) for before in resource)


def _several(replicas: tuple[Replica, ...]) -> str:
    return " + ".join(map(str, replicas))
