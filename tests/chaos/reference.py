"""``python -m tests.chaos.reference FOLDER COUNT``: greedy tokens of the plain model, without any cache of ours or of the library.

Prompts come as a JSON list of lists on stdin, the tokens go out as one. A process of its own: it imports torch.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    folder, count = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config(decoder=True)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, local_files_only=True).eval()
    out = []
    with torch.inference_mode():
        for prompt in json.load(sys.stdin):
            tokens = torch.tensor([prompt])
            for _ in range(count):
                following = model(input_ids=tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
                tokens = torch.cat([tokens, following], 1)
            out.append(tokens[0, len(prompt) :].tolist())
    print(json.dumps(out))


if __name__ == "__main__":
    main()
