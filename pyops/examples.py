"""Command lines that --help shows as examples.

The programs mnist, seq2seq and transformer have theirs in the docstrings of their modules; the commands of `pyops` are here.
"""
import re

# command -> (its arguments, what it does)
COMMANDS = {
    'doctor': [('', 'what is found here, and a test of the kernels'), ('--json', 'the same for a program')],
    'train': [('transformer --recipe minutes-30 -c ckpt', 'train a translator'), ('mnist -e 1', 'digits, one epoch')],
    'plan': [('mnist', 'every kernel of a training step'), ('transformer --preset base', 'of a larger model')],
    'translate': [('transformer -c ckpt "Go now."', 'one sentence'),
                  ('transformer -c ckpt < in.txt > out.txt', 'a line for each line')],
    'evaluate': [('transformer -c ckpt', 'BLEU and chrF on the test sentences'), ('seq2seq -c ckpt --json', '')],
    'average': [('transformer ckpt -o average.safetensors', 'the mean of the newest checkpoints')],
    'data list': [('', 'data sets, their licences and folders')],
    'data get': [('mnist', ''), ('fra-eng', 'the sentence pairs of the translators')],
    'data pack': [('pairs.txt packed --tokenizer bpe', 'files that training maps into memory')],
    'distributed doctor': [('', 'with mpirun -n 2 in front: of two ranks')],
    'distributed model': [('--part-ms 4 --sample-ms 1.5 --add-ms 1 --update-ms 5 --megabytes 30 --samples 128 --gbit 10', '')],
    'gradcheck': [('', 'all ops'), ('linear gru', 'two of them'), ('--json', 'for a program')],
    'bench': [('kernels gemm', 'matrix products beside PyTorch'), ('train seq2seq --vs torch jax', 'training steps'),
              ('translate transformer', 'sentences a second')],
    'inspect draw': [('--tensor-dir tensors --output-dir pictures', 'pictures and a page of saved tensors')],
    'inspect serve': [('tensors --open', 'the page, live, while a run saves tensors')],
    'inspect compare': [('tensors --formats mxfp8,mxfp4', 'errors of two formats, worst first'),
                        ('tensors --layers "encoder.*" --sort overflow', '')],
    'inspect products': [('tensors --formats none,mxfp8', 'errors of products in each pair of formats')],
    'inspect runs': [('run_a run_b', 'where two runs part, and the worst difference of each action'),
                     ('run_a --tensorboard events', 'curves for tensorboard --logdir events')],
    'inspect export': [('tensors dumps --naming te', 'files as DumpTensors of TransformerEngine writes them')],
    'inspect sensitivity': [('ckpt --formats mxfp4', 'which operand may be rounded'),
                            ('ckpt --search 1 --recipe recipe.txt', 'the cheapest recipe within 1 % of the loss')],
    'serve': [('ckpt', 'translations at http://127.0.0.1:8000'), ('ckpt --compute int8 --port 9000', '')],
    'replay': [('action_0.safetensors', 'the call that made a NaN, again')],
    'rewind': [('ckpt --step 1234', 'list the tensors of a past step'),
               ("ckpt --step 1234 --show 'encoder.0.self_attention.q wgrad.g'", 'print one of them')],
    'bisect': [("ckpt 'loss > 10'", 'the first step with this loss')],
    'branch': [('ckpt --step 1234 -l 0.0005', 'train on from there with another learning rate')],
    'exercises list': [('', 'names and what is left out')],
    'exercises start': [('gru work', 'write work/gru.py, to complete')],
    'exercises check': [('gru work', 'gradients and tests of the completed file')],
    'export torch': [('ckpt weights.pt', 'a state_dict')],
    'export ctranslate2': [('ckpt folder', 'a model for CTranslate2')],
    'export onnx': [('ckpt folder', 'graphs of the encoder and of a decoder step')],
    'version': [('', ''), ('--json', 'for a program')],
    'completion': [('bash', 'a script for ~/.bashrc: eval "$(pyops completion bash)"')]}

_OF_A_MODULE = re.compile(r'^    python -m (\S+) ?(.*?)(?:   *(\S.*))?$', re.M)
_COMMAND = re.compile(r'^(python -m )?pyops[ .]')


def shown(prog: str, docstring: str | None) -> str:
    """Return the examples of a command as the end of its --help, '' without any.

    prog: how the command is called, as argparse's;  docstring: of its module; None for a command of pyops.  Its lines
    `    python -m MODULE ARGUMENTS   what it does` are the examples.
    """
    found = of(prog, docstring)
    if not found:
        return ''
    wide = max(len(arguments) for arguments, _ in found)
    return '\nexamples:\n' + ''.join(f'  {prog} {arguments:{wide}}   {what}'.rstrip() + '\n' for arguments, what in found)


def of(prog: str, docstring: str | None) -> list[tuple[str, str]]:
    """Return [(arguments, what it does)].  Parameters as in `shown`."""
    if docstring:
        return [(arguments, what) for module, arguments, what in _OF_A_MODULE.findall(docstring) if prog.endswith(module)]
    return COMMANDS.get(_COMMAND.sub('', prog), [])
