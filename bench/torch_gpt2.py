"""GPT-2 in idiomatic PyTorch: contestant of bench.gpt2, reference in its tests."""
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, size, dtype):
        super().__init__()
        C, self.heads = size.width, size.heads
        self.ln1, self.ln2 = nn.LayerNorm(C, dtype=dtype), nn.LayerNorm(C, dtype=dtype)
        self.qkv, self.attproj = nn.Linear(C, 3 * C, dtype=dtype), nn.Linear(C, C, dtype=dtype)
        self.fc, self.fcproj = nn.Linear(C, 4 * C, dtype=dtype), nn.Linear(4 * C, C, dtype=dtype)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.ln1(x)).chunk(3, -1))
        x = x + self.attproj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate='tanh'))


class TorchGPT2(nn.Module):
    """ids, labels (B, T) int64 -> mean loss.   tensors: (name, values) as bench.llmc.read_model yields them"""

    def __init__(self, size, tensors, dtype=torch.float32):
        super().__init__()
        self.wte = nn.Embedding(size.words, size.width, dtype=dtype)
        self.wpe = nn.Embedding(size.positions, size.width, dtype=dtype)
        self.blocks = nn.ModuleList(Block(size, dtype) for _ in range(size.layers))
        self.lnf = nn.LayerNorm(size.width, dtype=dtype)
        self.output = nn.Linear(size.width, size.words, bias=False, dtype=dtype)
        self.output.weight = self.wte.weight
        with torch.no_grad():
            for name, values in tensors:
                for place, part in zip(self.places(name), [values] if name in ('wte', 'wpe', 'lnfw', 'lnfb') else values,
                                       strict=True):
                    place.copy_(torch.from_numpy(part))

    def places(self, name):
        """Return the parameters of a tensor of a file, one for each layer."""
        if name in ('wte', 'wpe'):
            return [getattr(self, name).weight]
        kind = {'w': 'weight', 'b': 'bias'}[name[-1]]
        owners = [self.lnf] if name[:-1] == 'lnf' else [getattr(block, name[:-1]) for block in self.blocks]
        return [getattr(owner, kind) for owner in owners]

    def forward(self, ids, labels):
        x = self.wte(ids) + self.wpe.weight[:ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.output(self.lnf(x)).flatten(0, 1), labels.flatten())


def make_step(model, lr, on_gpu=False):
    """Return step(ids, labels) -> loss: a training step with PyTorch's fused AdamW, without weight decay.

    on_gpu: a graph on a GPU can capture it
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, fused=True,
                                  capturable=on_gpu)

    def step(ids, labels):
        optimizer.zero_grad()
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()
    return step
