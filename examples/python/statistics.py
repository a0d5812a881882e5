"""What a tree cost, and what it looks like."""

import boxwood
from boxwood import stats
from boxwood.demo import image

with boxwood.local() as client, client.create_tree(image=image(client)) as tree:
    node = tree.sandbox.run("seq 1000 > /tmp/data").node
    with node.fork(4) as children:
        for child in children.ready:
            child.run("cat /tmp/data")

    turns = client.stats("turns", tree=tree)  # pyarrow; to="pandas" and to="polars" as well
    print(f"{stats.skip_share(turns):.0%} of {len(turns)} turns cost no capture")
    forks = stats.fork_latency(client.stats("forks", tree=tree))
    print(f"{forks.ready} children were ready, the slowest after {forks.longest * 1e3:.1f} ms")
    saved = stats.turns_saved(client.stats("nodes", tree=tree))
    print(f"{saved.run:g} turns were run in place of {saved.alone:g}")
    print(tree.plot().svg[:4], "is what a notebook shows of tree.plot()")
