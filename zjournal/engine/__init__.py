"""The engine: the one process that owns the model, the device and the KV cache.

It reads messages from one socket (link/wire.py) and answers on it; the parent is the only peer, and when
the parent goes, the engine goes. It knows no protocol, no tool, no SQL and no file but the model's.
One thread does everything: drain the socket, plan a step, run it, send what it brought, in one write.
Every accepted Generate ends in exactly one Finished or Failed; Tokens come in order and before it.
What runs has its room reserved from admission to end, so a step never waits for memory.
What ended well stays resident as a terminal state until its room is needed: each such change is a
numbered CacheChanged, which the parent acknowledges once it is durable.
Reuse is proved by comparing tokens, inside one namespace, to the single token.
A fault of one request fails that request; an assertion ends the process, and the parent starts another.
"""
