"""A turn, what it changed, and eight branches of it."""

import boxwood
from boxwood.demo import image

with boxwood.local() as client, client.create_tree(image=image(client)) as tree:
    turn = tree.sandbox.run("echo hello > /tmp/greeting; echo done")
    print(turn.stdout.text, turn.verdict, [str(effect) for effect in turn.effects])

    with turn.node.fork(8, min_ready=8) as children:
        for number, child in enumerate(children.ready):
            reply = child.run(f"echo child {number} >> /tmp/greeting; cat /tmp/greeting")
            reply.node.annotate(reward=float(number))

    print(tree.show())
