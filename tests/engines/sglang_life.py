"""A life of a real SGLang on a CPU, in a process of its own: it answers one line of JSON on its standard output for each on its
standard input, `{"prompts": [[token, ...]]}`. The first line in names the engine's settings."""

import json
import os
import sys


def main():
    said = os.fdopen(os.dup(1), "w")
    # SGLang's own lines go to the log.
    os.dup2(2, 1)

    def say(what):
        print(json.dumps(what), file=said, flush=True)

    import sglang

    engine = sglang.Engine(
        device="cpu",
        attention_backend="torch_native",
        skip_tokenizer_init=True,
        disable_overlap_schedule=True,
        mem_fraction_static=0.1,
        max_total_tokens=8192,
        # Another batch shape must not change a token.
        dtype="float32",
        random_seed=0,
        **json.loads(sys.stdin.readline()),
    )
    say({"started": True})
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("flush"):
            engine.flush_cache()
            say({})
            continue
        outputs = engine.generate(input_ids=asked["prompts"], sampling_params=sampling)
        details = [output["meta_info"].get("cached_tokens_details") or {} for output in outputs]
        say(
            {"tokens": [output["output_ids"] for output in outputs], "stored": [of.get("storage", 0) for of in details]}
        )
    engine.shutdown()


if __name__ == "__main__":
    main()
