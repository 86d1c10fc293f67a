"""python -m pyops inspect export: write saved tensors as files that are named as by the dumps of other programs.

    te           rank_0/{layer}_{tensor}_iter_{step}.pt of TransformerEngine's DumpTensors: linear layers only
    megatron     {time}_{counter}_iter{step}_{type}_L{index}_{operation}_..._{tensor}.pt of a fork of Megatron: all tensors

logs.py reads both.
"""
from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pyops.errors import UserError, printable
from pyops.inspect.choice import select
from pyops.inspect.logs import DUMPED_NAMES, LogError, Logs
from pyops.inspect.tables import cannot_write, print_skipped
from pyops.training import watch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyops.inspect.logs import Entry

NAMINGS = 'te', 'megatron'
_KEPT = 'bfloat16', 'float16'           # dtypes that a file keeps; all others are float32


def run(options: Any) -> int:
    """Write the chosen tensors of options.logs to options.folder.  Return exit status 0."""
    _need_torch()
    logs = Logs(options.logs)
    entries = select(logs.entries, options.layers, options.names, options.steps)
    inside, around = os.path.realpath(options.folder), os.path.realpath(options.logs)
    if os.path.commonpath([inside, around]) == around:
        raise UserError(f'{printable(options.folder)}: is in the folder of the tensors; choose a folder outside it')
    skipped = list(logs.skipped)
    written = 0
    for file, content in watch(named(entries, options.naming, skipped), len(entries), 'export'):
        _save(os.path.join(options.folder, file), content)
        written += 1
    if not written:
        raise UserError(f'{printable(options.logs)}: none of {len(entries)} tensors can be exported ({skipped[-1][1]})')
    print(f'{written} of {len(entries)} tensors written to {options.folder}')
    print_skipped(skipped)
    return 0


def named(entries: Iterable[Entry], naming: str, skipped: list[tuple[str, str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file, content for torch.save) of each tensor; append (file, reason) to `skipped` for those that have no such name
    or cannot be read."""
    seen: set[str] = set()
    for entry in entries:
        file = _te_file(entry) if naming == 'te' else _megatron_file(entry)
        if file is None or file in seen:
            skipped.append((entry.relative_path, 'a second tensor of this name' if file else
                            'TransformerEngine has names only for tensors of linear layers without time steps'))
            continue
        try:
            tensor = _tensor(entry)
        except LogError as error:
            skipped.append((entry.relative_path, str(error)))
            continue
        seen.add(file)
        yield file, {'high_precision': tensor} if naming == 'te' else _megatron_content(entry, tensor)


def _tensor(entry):
    import torch
    return torch.from_numpy(entry.load()).to(getattr(torch, entry.dtype if entry.dtype in _KEPT else 'float32'))


def _te_file(entry):
    tensor = DUMPED_NAMES.get((entry.operation, entry.name))
    if tensor is None or entry.layer_type != 'linear' or entry.time is not None:
        return None
    return os.path.join(f'rank_{entry.rank or 0}', f'{_safe(entry.layer)}_{tensor}_iter_{entry.step:06d}.pt')


def _megatron_file(entry):
    parts = [entry.timestamp or '19700101_000000', f'{entry.counter:04d}', f'iter{entry.step:03d}', entry.layer_type,
             f'L{entry.index}', entry.operation]
    parts += [entry.phase or 'unknown', entry.component] if entry.component else []
    parts.append(entry.format)
    parts += [f'{name}{value:0{digits}d}' for name, digits in (('rank', 2), ('sample', 3), ('group', 3))
              if (value := getattr(entry, name)) is not None]
    parts.append(_safe(entry.name) + ('' if entry.time is None else f'_t{entry.time}'))
    return '_'.join(parts) + '.pt'


def _megatron_content(entry, tensor):
    metadata = {'layer_type': entry.layer_type, 'operation': entry.operation, 'quant_type': entry.format,
                'tensor_name': entry.name + ('' if entry.time is None else f'_t{entry.time}'), 'layer_idx': entry.index,
                'iteration': entry.step, 'phase': entry.phase, 'component': entry.component, 'rank': entry.rank,
                'sample': entry.sample, 'group': entry.group}
    return {'tensor': tensor, 'tensor_info': {'shape': list(entry.shape), 'dtype': str(tensor.dtype)},
            'metadata': {name: value for name, value in metadata.items() if value not in ('', None)}}


def _safe(text: str) -> str:
    return text.replace(os.sep, '-').replace('\0', '-')


def _save(path, content):
    import io

    import torch

    from pyops.files import write_atomically
    if os.path.lexists(path):
        raise UserError(f'{printable(path)}: exists; name another folder, or remove it')
    file = io.BytesIO()
    torch.save(content, file)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_atomically(path, file.getbuffer())
    except OSError as error:
        raise cannot_write(path, error, 'DIR') from error


def _need_torch():
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UserError('torch is not installed: install it with: pip install torch') from error
