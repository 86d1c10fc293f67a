"""Train the transformer on sentence pairs, resume a checkpoint, or serve one.

    python -m transformer.train -e 10 -c ckpt           train until 10 epochs are done; the same command resumes
    python -m transformer.train -e 0 -c ckpt            serve: translate lines from standard input
    python -m transformer.train --preset base           the size and schedule of the paper (Vaswani et al. 2017)
"""
from argparse import BooleanOptionalAction

from pyops.errors import exits_cleanly
from pyops.training import Progress, fraction, int_up_to, non_negative_int
from pyops.translator.program import Architecture, Program


class TransformerProgram(Program):
    name = 'transformer'
    description = 'Train a transformer that translates English to French.'
    dropped = 'of embeddings, attention weights and the outputs of sublayers'
    DEFAULTS = Program.DEFAULTS | dict(lr=0.001, dropout=0.2, d_model=256, d_ff=64, heads=4, layers=2, positions=1000,
                                       pre_norm=False, smoothing=0.0)
    PRESETS = {'small': {},
               'base': dict(lr=0.0007, dropout=0.1, d_model=512, d_ff=2048, heads=8, layers=6, num_steps=64, pre_norm=True,
                            smoothing=0.1, warmup=4000)}
    GROWING = 'd_model', 'd_ff', 'layers'
    drop_last = True
    line_first = True

    def add_flags(self, parser):
        model, schedule = parser.group('model'), parser.group('presets and schedule')
        self.add_setting(model, '--d-model', type=int_up_to(65536), help='size of a word embedding and of a hidden state')
        self.add_setting(model, '--d-ff', type=int_up_to(65536), help='inner size of a feed-forward layer')
        self.add_setting(model, '--heads', type=int_up_to(1024), help='attention heads; d-model is divided among them')
        self.add_setting(model, '--layers', type=int_up_to(64), help='blocks, of the encoder and of the decoder')
        self.add_setting(model, '--positions', type=int_up_to(1000), help='encoded positions: the largest num-steps')
        model.add_argument('--pre-norm', action=BooleanOptionalAction,
                           help='apply layer norm before each sublayer instead of after its sum (default: after)')
        self.add_setting(schedule, '--smoothing', type=fraction, metavar='P',
                         help='label smoothing: the share of a label that is spread over all words')
        self.add_setting(schedule, '--warmup', type=non_negative_int,
                         help='steps in which the learning rate rises; then it falls with the square root of the step; 0: '
                         'constant')

    def architecture(self):
        from transformer.model import SIZES, Config, Transformer, parameter_specs
        return Architecture(SIZES, Config, Transformer, parameter_specs)

    def after_data(self, args, settings, found, vocabularies):
        from pyops.text.vocabulary import BOS, EOS, PAD
        source, target = vocabularies
        return (f'epochs : {args.epochs}\nbatch_size : {settings["batch_size"]}\ngpu : {args.gpu}\n'
                f'learning rate : {settings["lr"]}\ncheckpoint : {found.path or "none"}\n'
                f'enc_vocab_size : {len(source)}\ndec_vocab_size : {len(target)}\n'
                f'bos_id : {BOS}\neos_id : {EOS}\nsrc_pad_id : {PAD}\ntgt_pad_id : {PAD}')

    def before_epochs(self, plan):
        memory = plan.memory()
        return (f'allocated : {memory.parameters + memory.moments + memory.inputs} bytes for tensors, '
                f'{memory.intermediates} for intermediate and {memory.gradients} for gradient tensors')

    def progress(self, epoch, total, initial):
        return Progress(total, 'pairs', initial, label=f'epoch {epoch} :  ', at_end=False)

    def epoch_line(self, values):
        epoch, samples = values['epoch'] - 1, values['samples']
        return f'epoch {epoch} :  [{samples}/{samples}] loss : {values["loss"]:.5f}'

    def answer(self, read, output):
        from pyops.text.translation import sentence
        return [f'{sentence(read)} -> {sentence(output)}']


PROGRAM = TransformerProgram()
parse, main = PROGRAM.parse, PROGRAM.main

if __name__ == '__main__':
    with exits_cleanly('transformer.train'):
        main()
