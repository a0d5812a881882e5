"""Randomness of a program that goes on in several children."""
import os
import random
import ssl

from lib import serve


def generation():
    with open("/etc/machine-id") as f:
        return f.read()


born = generation()


def reseed():
    """Before randomness matters: in another child than before it draws anew."""
    global born
    if (now := generation()) != born:
        born = now
        random.seed()  # from the kernel
        ssl.RAND_add(os.urandom(64), 64.0)  # the OpenSSL of this process


taken = 0


def step():
    global taken
    taken += 1
    with open("/root/drawn", "a") as f:
        print("plain", random.random(), ssl.RAND_bytes(8).hex(), file=f)
        reseed()
        print("python", random.random(), file=f)
        print("openssl", ssl.RAND_bytes(8).hex(), file=f)
    return taken


random.random()
ssl.RAND_bytes(8)
serve(step)
