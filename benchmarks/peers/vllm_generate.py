"""How fast does vLLM's CPU build generate? Run by benchmarks/generate.py, in vLLM's own environment.

    python vllm_generate.py MODEL BATCHES REPEATS PROMPT_TOKENS NEW_TOKENS

The last line is a JSON object: batch size -> median tokens/s.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)


def main() -> None:
    model, sizes, repeats, prompt_tokens, new_tokens = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    import torch
    from vllm import LLM, SamplingParams

    batches = [int(size) for size in sizes.split(",")]
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=max(batches),
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        distributed_executor_backend="uni",
    )
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    sampling = SamplingParams(max_tokens=new_tokens, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)
    draw = random.Random(0)
    figures = {}
    for batch in batches:
        seconds = []
        for _ in range(repeats + 1):
            ids = [[draw.randrange(5, vocabulary) for _ in range(prompt_tokens)] for _ in range(batch)]
            prompts = [{"prompt_token_ids": prompt} for prompt in ids]
            began = time.perf_counter()
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
            assert sum(len(output.outputs[0].token_ids) for output in outputs) == batch * new_tokens
        figures[batch] = batch * new_tokens / statistics.median(seconds[1:])
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
