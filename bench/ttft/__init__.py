"""The parts of bench/ttft.py.

environment      a Python with vLLM and the wheel
gateway          `kvgate serve`, which may die and come back
engines          `vllm serve`, asked over HTTP: the time to the first token, and the hits that it counts
workloads        documents, conversations, retrieved documents
measure          the passes: store, restart, ask again, beside a vLLM without kvgate
overhead         a workload without reuse: a gateway that works, is gone, is slow, or has damaged objects
inside           what runs in the engine's environment: kvgate_timed, the connector with a clock around each call, and
                 scheduler_calls, what each call on the scheduler's thread takes for a long prompt
tables           the results for people
plot             the results as lines
"""
