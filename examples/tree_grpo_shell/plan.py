"""What was decided before the first run: tasks, arms, budgets, reward level, stop rule, statistics.

This file and `tasks.py` were committed before anything had been trained, and are not tuned to what came
out. A later change of either makes a new experiment: say so in the README, and run all of it again.

The question: how many turns, and how many seconds, does a policy need until it mends unseen tasks to a
given level, when its rollouts are

    A  independent, GRPO;
    B  trees, Tree-GRPO, whose branches are forks of nodes;
    C  the same trees, whose branches are made by executing their prefixes again;
    D  B with the values of its branch points shuffled.

B over A in turns is what the algorithm gains, B over C in seconds what the engine gains, B over D in
turns how much of the first comes from the branch points' values and not from the shape of the sampling.

**Turns** are those that were sampled from the policy and executed for training. What C executes again are
no turns; they cost it seconds, and are counted as `replayed`. Turns for measuring the level are counted
for no arm.

**The policy** is linear: a softmax over ten commands, whose features are the words of the last line that
the agent saw, hashed into FEATURES places and scaled to length 1, and one that is always there. It is no
LLM. Each optimiser step is one plain step along the policy gradient: the mean over the sampled tokens, by
their loss weights, of advantage times gradient of the log-probability.

**Equal** for all arms: the tasks of each optimiser step, one step of the optimiser each, the policy's
start (all zero), the turns of a step. Episodes have exactly STAGES turns, so a step of A has
TASKS_PER_STEP * ROLLOUTS * STAGES. A tree draws its branch points at random, so that its turns can't be
set exactly: B, C and D choose the number of branches for each task such that the sum over all steps so
far comes as near to A's as it can. What was executed in a step on average is reported.

**Advantages**: A `grpo_advantages`, the others `tree_grpo_advantages`; tokens that k trajectories share
count 1/k in each ("split"). So what a shared turn gets is the mean over the leaves below it, which is the
value of the branch point it leads to. D permutes these values among the branch points of one search; the
turns of a single leaf keep theirs.

**Hyperparameters**: the learning rate, out of LEARNING_RATES, for A, B and D apart: the one with the
fewest turns to the level, mean over TUNING_SEEDS, which are used for nothing else; of equals the smaller
one. C has B's, since it is the same algorithm. This search, and it alone, runs on a twin of the tasks in
memory (`twin.py`), which is held against real sandboxes by a test: what a task answers to a sequence of
commands is the same in both. All figures are from real sandboxes.

**Level**: mean reward of one sampled episode on each of the held-out tasks, measured before the first
step and after every MEASURED_EVERY steps. An arm stops at the first measurement at or above LEVEL; turns
and seconds to the level are interpolated linearly between this measurement and the one before. An arm
that is not there after MAX_STEPS stops, counts as if it had reached the level just then, and is reported
as censored.

**Seconds** are wall time of the training steps: policy, turns, captures, forks, verification, grading and
release, all awaited; neither the measuring of the level nor the making of the tasks' start states. Arms
of a seed run one after the other on the same host, in an order that rotates with the seed.

**Ratios** are the sum over seeds of the one arm over that of the other; intervals are 95 % percentile
intervals of BOOTSTRAP resamples of seeds, pairs kept together.

**C's observations** are held against B's: each turn that it executes again against what the first
execution showed, and each place of its trees against B's place of the same name in the same step of the
same seed. What differs is counted and reported.

**The sweep** asks where branching loses: seconds of a training step of A, B and C, if each turn's command
takes PREFIX_COSTS longer and each call of the policy waits LLM_WAITS, both by real sleeps, divided by a
compression that is reported with the figures. The engine's own time isn't compressed, which is to the
disadvantage of the arm that has more of it.
"""

from __future__ import annotations

# Tasks.
STAGES = 6
TRAINING_TASKS = 24
HELD_OUT_TASKS = 12

# The policy.
FEATURES = 128

# Sampling: one optimiser step.
TASKS_PER_STEP = 3
ROLLOUTS = 8
TREES = 2
ROUNDS = 1

# The level and the end.
LEVEL = 0.8
MEASURED_EVERY = 2
MAX_STEPS = 40

# Repetition.
SEEDS = tuple(range(10))
TUNING_SEEDS = (100, 101, 102, 103)
LEARNING_RATES = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
BOOTSTRAP = 10_000

# Targets: turns of B over A, seconds of B over C.
TARGET_TURNS = 0.6
TARGET_SECONDS = 0.5

# The sweep, in seconds. The smallest cost is that of the command itself, without a sleep.
PREFIX_COSTS = (0.003, 0.1, 1.0, 10.0)
LLM_WAITS = (0.0, 1.0, 5.0)
