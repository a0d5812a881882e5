"""Ten lines of Boxwood: a turn, a fork of its node, eight independent children.

Run: python3 examples/quickstart.py [SOCKET] [IMAGE]
"""

import sys

import boxwood

address = sys.argv[1] if len(sys.argv) > 1 else None
image = sys.argv[2] if len(sys.argv) > 2 else "boxwood/base:latest"

with boxwood.connect(address) as client, client.create_tree(image=image) as tree:
    turn = tree.sandbox.run("echo hello > /tmp/greeting")
    print(turn.verdict, [str(effect) for effect in turn.effects])
    with turn.node.fork(8) as children:
        for number, child in enumerate(children.ready):
            reply = child.run(f"echo child {number} >> /tmp/greeting; cat /tmp/greeting")
            reply.node.annotate(reward=float(number))
    print(tree.show())
