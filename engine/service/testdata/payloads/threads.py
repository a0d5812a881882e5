"""Threads that wait in different ways, a signal handler, a timer, a clock."""
import os, queue, signal, threading, time
from lib import serve

COUNT = 4
inbox = [queue.Queue() for _ in range(COUNT)]
outbox = queue.Queue()
signals = 0
local = threading.local()


def worker(i):
    local.n = 0
    while True:
        inbox[i].get()
        local.n += 1
        outbox.put((i, local.n))


def usr1(*_):
    global signals
    signals += 1


signal.signal(signal.SIGUSR1, usr1)
signal.signal(signal.SIGALRM, usr1)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.setitimer(signal.ITIMER_REAL, 3600)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
for i in range(COUNT):
    threading.Thread(target=worker, args=(i,), daemon=True).start()
os.kill(os.getpid(), signal.SIGUSR2)
last = time.monotonic()


def step():
    global last
    for q in inbox:
        q.put(1)
    got = sorted(outbox.get(timeout=10) for _ in range(COUNT))
    assert len({n for _, n in got}) == 1, got
    n = got[0][1]
    os.kill(os.getpid(), signal.SIGUSR1)
    while signals < n:
        time.sleep(0.001)
    assert signals == n, (signals, n)
    left = signal.getitimer(signal.ITIMER_REAL)[0]
    assert 3000 < left <= 3600, left
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.SIGUSR2 in signal.sigpending(), "a pending signal is gone"
    now = time.monotonic()
    assert now >= last, (now, last)
    last = now
    return n


serve(step)
