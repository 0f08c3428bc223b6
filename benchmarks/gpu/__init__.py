"""One command that a short visit to a GPU needs: `python -m benchmarks.gpu --out DIR --minutes 9`.

It needs one GPU, torch, Triton, NumPy, transformers, safetensors, tokenizers and msgpack; neither Ray, nor a network,
nor an installed quire. Each stage is a process of its own with a time limit, and writes DIR/<stage>.json after every
figure.
"""
