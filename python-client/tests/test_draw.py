"""What a notebook shows: trees as pictures, handles as tables; what a sandbox printed stays text."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import boxwood

HOSTILE = "echo '<script>alert(1)</script>' \"]; & \\x1b[31m\\0"


def grown(tree: boxwood.Tree) -> boxwood.Node:
    first = tree.sandbox.run("echo x > made").node
    first.annotate(rewards={"reward": 0.5}, value=0.25, visits=4)
    with first.fork(3) as children:
        for number, child in enumerate(children.ready):
            child.run(f"cat made; : {number}")
    tree.sandbox.run(["printf", "%s", HOSTILE])
    return first


def test_a_drawing_has_every_node_and_edge(tree: boxwood.Tree, tmp_path: Path) -> None:
    first = grown(tree)
    drawing = tree.plot()
    picture = ElementTree.fromstring(drawing.svg)
    space = "{http://www.w3.org/2000/svg}"
    boxes = picture.findall(f"{space}g/{space}rect")
    assert len(boxes) == 6
    assert len(picture.findall(f"{space}path")) == 5
    texts = [text.text or "" for text in picture.iter(f"{space}text")]
    assert "root" in texts
    assert any("reward 0.5" in text and "value 0.25 (4)" in text for text in texts)
    # No box lies over another.
    places = {(box.get("x"), box.get("y")) for box in boxes}
    assert len(places) == 6
    columns = {float(box.get("x", "")) for box in boxes}
    assert len(columns) == 3
    # A part of it, and files.
    assert len(ElementTree.fromstring(tree.plot(under=first).svg).findall(f"{space}g")) == 5
    drawing.save(tmp_path / "tree.svg")
    drawing.save(tmp_path / "tree.dot")
    assert (tmp_path / "tree.svg").read_text() == drawing.svg == drawing._repr_svg_()
    with pytest.raises(boxwood.InvalidArgument, match=r"\.svg or \.dot"):
        drawing.save(tmp_path / "tree.png")
    dot = (tmp_path / "tree.dot").read_text()
    assert dot.count("->") == 5
    if shutil.which("dot"):
        subprocess.run(["dot", "-Tsvg", tmp_path / "tree.dot"], check=True, capture_output=True)


def test_what_a_sandbox_printed_stays_text(tree: boxwood.Tree) -> None:
    turn = tree.sandbox.run(f"printf '%s' '<img src=x onerror=alert(1)>' # {HOSTILE}")
    tree.root.annotate(labels={"<b>": "</table>"})
    for shown in (turn._repr_html_(), turn.node._repr_html_(), tree.root._repr_html_(), tree.plot().svg):
        assert "<script" not in shown
        assert "<img" not in shown
        assert "</table><" not in shown
        ElementTree.fromstring(shown)
    assert "&lt;img src=x" in turn._repr_html_()
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", tree.plot().svg)


def test_handles_are_shown_as_tables(tree: boxwood.Tree) -> None:
    grown(tree)
    assert tree.root_id in tree._repr_html_()
    with tree.root.fork(2) as children:
        assert children.ready[0].id in children._repr_html_()


def test_a_deep_tree_is_drawn(tree: boxwood.Tree) -> None:
    from boxwood import node as nodes
    from boxwood._draw import Drawing
    from boxwood._proto import boxwood_pb2 as pb

    deep = [
        nodes.from_message(tree._client, pb.Node(id=f"n{n}", parent_id=f"n{n - 1}" if n else "", depth=n))
        for n in range(3000)
    ]
    assert Drawing("deep", deep).svg.count("<rect") == 3000
