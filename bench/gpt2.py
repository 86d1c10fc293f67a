"""Time training steps of GPT-2 with 124 million parameters: pyops beside PyTorch and llm.c, from the same weights and tokens.

    python -m bench.gpt2                            4 x 64 tokens a step, as llm.c's train_gpt2 takes
    python -m bench.gpt2 --llmc llm.c               also llm.c, from a checkout: git clone https://github.com/karpathy/llm.c
    python -m bench.gpt2 --recompute --batch-size 1 --tokens 1024 --turns 5     also ours with recomputed activations
    python -m bench.gpt2 --llmc llm.c --save        and append the figures to bench/results/gpt2.jsonl

A step is forward, backward and AdamW with llm.c's settings (learning rate 1e-4, no weight decay), without dropout.  Weights and
tokens are random; all contestants read them from files in llm.c's formats.  After the timed turns the losses of all steps are
compared: if one differs from pyops' by more than 0.1 %, with recomputation at all, the exit status is 1 and nothing is saved.
"""
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench import llmc, results
from bench.contest import (
    NAMES,
    RECOMPUTE,
    Contestant,
    add_contestant_flags,
    add_recompute_flag,
    figures_of,
    kinds_of,
    print_figures,
)
from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, non_negative_int, positive_int

PROGRAM = 'bench.gpt2'
LR = 1e-4
TOLERANCE = 1e-3        # of the loss of a step: Adam divides by the root of v, so it enlarges the rounding of small gradients
WEIGHTS, TOKENS = 'weights.bin', 'tokens.bin'


def parse(argv):
    p, default = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0]), llmc.Size()
    p.add_argument('--llmc', type=Path, metavar='DIR', help='a checkout of llm.c, which is compiled and also timed')
    p.add_argument('--no-torch', action='store_true', help='leave out PyTorch')
    add_recompute_flag(p)
    add_contestant_flags(p)
    p.add_argument('--batch-size', type=positive_int, default=4, metavar='N', help='sequences a step (default %(default)s)')
    p.add_argument('--tokens', type=positive_int, default=64, metavar='N', help='tokens of a sequence (default %(default)s)')
    for name, what in (('layers', 'blocks'), ('heads', 'attention heads'), ('width', 'units of a token'),
                       ('words', 'of the vocabulary'), ('positions', 'longest sequence')):
        p.add_argument(f'--{name}', type=positive_int, default=getattr(default, name), metavar='N',
                       help=f'{what} (default %(default)s)')
    p.add_argument('--turns', type=positive_int, default=12, metavar='N', help='timed steps of each (default %(default)s)')
    p.add_argument('--warmup', type=non_negative_int, default=2, metavar='N', help='steps before (default %(default)s)')
    p.add_argument('--json', action='store_true', help='print one JSON object and nothing else')
    p.add_argument('--save', action='store_true', help='append the figures to bench/results')
    args = p.parse_args(argv)
    if args.tokens > args.positions:
        raise UserError(f'--tokens {args.tokens}: expected at most --positions {args.positions}')
    if args.width % args.heads:
        raise UserError(f'--heads {args.heads}: expected a divisor of --width {args.width}')
    if args.words > 2**16:
        raise UserError(f'--words {args.words}: expected at most 65536, which the files of tokens can hold')
    return args


def prepare(folder, size, batch, length, steps):
    """Write random weights, and random tokens for so many steps."""
    llmc.write_model(folder / WEIGHTS, size, llmc.random_tensors(size))
    ids = np.random.default_rng(1).integers(0, size.words, steps * batch * length + 1)
    llmc.write_tokens(folder / TOKENS, ids)
    (folder / 'batch.json').write_text(json.dumps([batch, length]))


def train(folder, kind):
    """Return turn and describe of a contestant, for bench.worker: step k uses batch k."""
    from bench.translation import flops_of, job
    batch, length = json.loads((folder / 'batch.json').read_text())
    size, tensors = llmc.read_size(folder / WEIGHTS), llmc.read_model(folder / WEIGHTS)
    tokens = llmc.read_tokens(folder / TOKENS)
    if kind in ('ours', 'ours' + RECOMPUTE):
        from bench.gpt2_model import GPT2, training_steps
        from pyops.optim import AdamW
        model = GPT2(size, tensors, recompute=kind.endswith(RECOMPUTE))
        steps = training_steps(model, AdamW(model.params, LR, weight_decay=0.0), tokens, length)
        rows = np.arange(batch)
        return job(lambda k: float(steps(rows + k * batch)[0]), lambda: dict(flops=flops_of(steps.plan(rows))))
    import torch

    from bench.torch_gpt2 import TorchGPT2, make_step
    model = TorchGPT2(size, tensors)
    run = make_step(torch.compile(model) if kind == 'torch-compile' else model, LR)
    total = len(tokens) // (batch * length) * batch * length
    ids, labels = (torch.from_numpy(part.reshape(-1, batch, length)).long() for part in (tokens[:total], tokens[1:total + 1]))
    return job(lambda k: run(ids[k], labels[k]).item())


def contest(args, kinds, threads):
    """Let the contestants take turns of one step.  Return figures and losses by kind."""
    size = llmc.Size(*(getattr(args, name) for name in llmc.Size._fields))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        commands = {}
        if args.llmc:
            commands['llmc'] = [str(value) for value in (llmc.build(args.llmc, folder), folder / WEIGHTS, folder / TOKENS,
                                                         args.batch_size, args.tokens)]
        prepare(folder, size, args.batch_size, args.tokens, args.warmup + args.turns)
        workers = {kind: stack.enter_context(Contestant('gpt2', 'train', kind, folder, threads, commands.get(kind)))
                   for kind in kinds}
        answers = {kind: [] for kind in kinds}
        for step in range(args.warmup + args.turns):
            for kind, worker in workers.items():
                answers[kind].append(worker.turn(step, step + 1))
    figures = {kind: figures_of(found[args.warmup:]) for kind, found in answers.items()}
    return figures, {kind: [answer['loss'] for answer in found] for kind, found in answers.items()}


def differences(losses):
    """Return {kind: largest relative difference} of the contestants with a loss too far from the first one's."""
    first = np.array(next(iter(losses.values())))
    away = {kind: float(np.max(np.abs(np.array(found) - first) / np.abs(first))) for kind, found in losses.items()}
    return {kind: d for kind, d in away.items() if not d <= (0.0 if RECOMPUTE in kind else TOLERANCE)}     # a NaN is too far


def main(argv=None):
    args = parse(argv)
    from pyops import backend
    threads = args.threads or backend.threads()
    kinds = kinds_of(args, not args.no_torch, recompute=args.recompute) + ['llmc'] * bool(args.llmc)
    figures, losses = contest(args, kinds, threads)
    known = {name: getattr(args, name) for name in ('batch_size', 'tokens', *llmc.Size._fields)}
    known |= {'steps': args.turns, 'threads': threads, 'isa': backend.isa()}
    if args.json:
        print(json.dumps(known | {'contestants': figures}))
    else:
        tokens = args.batch_size * args.tokens
        print(f'GPT-2, {args.layers} layers of {args.width}, {args.words} words; {args.batch_size} x {args.tokens} tokens; '
              f'{threads} threads, {backend.float32_isa()}, {args.turns} turns of a step')
        print_figures('a training step', figures, tokens, 'tokens')
        print('loss at step        ' + ''.join(f'{k:9d}' for k in range(0, len(losses['ours']), 4)))
        for kind, found in losses.items():
            print(f'{NAMES[kind]:20}' + ''.join(f'{loss:9.5f}' for loss in found[::4]))
        if not args.llmc:
            print(f'llm.c was left out; get it with: {llmc.GET}; and add: --llmc llm.c')
    wrong = differences(losses)
    for kind, difference in wrong.items():
        print(f'{PROGRAM}: {NAMES[kind]}: a loss differs from the loss of {NAMES["ours"]} by {difference:.2%}', file=sys.stderr)
    if not wrong and args.save:
        results.save('gpt2', known | {'contestants': figures})
    return 1 if wrong else 0


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
