"""Ten lines of Boxwood: a turn, a fork of its node, eight independent children.

It needs a daemon (`boxwood serve`) and an image (`boxwood image build-base`).
"""

import os

import boxwood

image = os.environ.get("BOXWOOD_IMAGE", "boxwood/base")
with boxwood.connect() as client, client.create_tree(image=image) as tree:
    turn = tree.sandbox.run("echo hello > /tmp/greeting")
    print(turn.verdict, [str(effect) for effect in turn.effects])
    with turn.node.fork(8) as children:
        for number, child in enumerate(children.ready):
            reply = child.run(f"echo child {number} >> /tmp/greeting; cat /tmp/greeting")
            reply.node.annotate(reward=float(number))
    print(tree.show())
