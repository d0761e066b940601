"""Do people see every primitive, and whom it waits for?"""

from __future__ import annotations

from nereus.core.plan import Layout
from nereus.transition.compile import nominal_seconds
from nereus.transition.primitive import Merge, Park, Replica, Split, Unpark
from nereus.transition.render import dot, mermaid, sentence, table
from tests.transition.journeys import GENERATION, TRAINING, compiled, units

T1, T2 = Layout(1, 1), Layout(2, 1)
BEFORE = units(GENERATION, T1, (0,), (1,)) + units(TRAINING, T1, (2,))
AFTER = units(GENERATION, T1, (0,)) + units(TRAINING, T1, (1,), first=1)
DAG = compiled(BEFORE, AFTER)


def test_the_table_has_a_row_for_each_primitive() -> None:
    cells = [line.split("  ") for line in table(DAG, nominal_seconds).splitlines()]
    assert [[cell.strip() for cell in row if cell.strip()] for row in cells if row[0].strip("-")] == [
        ["primitive", "what", "after", "waits for room from", "seconds"],
        ["policy.generation/destroy-0", "drop t1p1 on 1", "0.01"],
        ["policy.training/extend-1", "t1p1 on 2 sent to t1p1 on 1", "policy.generation/destroy-0", "1"],
        ["policy.training/destroy-2", "drop t1p1 on 2", "policy.training/extend-1", "0.01"],
    ]
    assert "seconds" not in table(DAG)
    assert table(compiled(BEFORE, BEFORE)) == "nothing to do: both plans have the same replicas"


def test_mermaid_and_dot_dash_the_edges_of_room() -> None:
    assert mermaid(DAG).splitlines() == [
        "flowchart LR",
        '  n0["policy.generation/destroy-0<br>drop t1p1 on 1"]',
        '  n1["policy.training/extend-1<br>t1p1 on 2 sent to t1p1 on 1"]',
        '  n2["policy.training/destroy-2<br>drop t1p1 on 2"]',
        "  n0 -.-> n1",
        "  n1 --> n2",
    ]
    assert dot(DAG).splitlines()[3:] == [
        '  n0 [label="policy.generation/destroy-0\\ndrop t1p1 on 1"];',
        '  n1 [label="policy.training/extend-1\\nt1p1 on 2 sent to t1p1 on 1"];',
        '  n2 [label="policy.training/destroy-2\\ndrop t1p1 on 2"];',
        "  n0 -> n1 [style=dashed];",
        "  n1 -> n2;",
        "}",
    ]


def test_every_primitive_is_a_sentence() -> None:
    pair, one, two = Replica(TRAINING, T2, (0, 1)), Replica(TRAINING, T1, (0,)), Replica(TRAINING, T1, (1,))
    assert sentence(Split("s", pair, (one, two))) == "t2p1 on 0,1 becomes t1p1 on 0 + t1p1 on 1"
    assert sentence(Merge("m", (one, two), pair, True)) == "t1p1 on 0 + t1p1 on 1 becomes t2p1 on 0,1"
    assert sentence(Merge("m", (pair,), pair, False)) == "t2p1 on 0,1 becomes t2p1 on 0,1, reshuffled"
    assert sentence(Park("p", one)) == "t1p1 on 0 goes to host memory"
    assert sentence(Unpark("u", one, two)) == "t1p1 on 0 comes back from host memory to t1p1 on 1"
