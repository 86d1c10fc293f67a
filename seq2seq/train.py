"""Train the deep GRU on sentence pairs, resume a checkpoint, or serve one.

    python -m seq2seq.train -e 50 -c ckpt           train until 50 epochs are done; the same command resumes
    python -m seq2seq.train -e 0 -c ckpt            serve: translate lines from standard input
    python -m seq2seq.train -e 1 -t 1               a trial on 512 pairs
"""
from pyops.errors import exits_cleanly
from pyops.training import int_up_to
from pyops.translator.program import Architecture, Program


class Seq2SeqProgram(Program):
    name = 'seq2seq'
    description = 'Train a deep GRU that translates English to French.'
    epochs = 50
    dropped = 'between the GRU layers'
    DEFAULTS = Program.DEFAULTS | dict(lr=0.005, dropout=0.2, embedding=256, hidden=256, layers=2, reset_before=False)
    GROWING = 'embedding', 'hidden', 'layers'

    def add_flags(self, parser):
        model = parser.group('model')
        self.add_setting(model, '--embedding', type=int_up_to(65536), help='size of a word embedding')
        self.add_setting(model, '--hidden', type=int_up_to(65536), help='size of a hidden state')
        self.add_setting(model, '--layers', type=int_up_to(64), help='GRU layers, of the encoder and of the decoder')
        model.add_argument('--reset-before', action='store_true', default=None,
                           help='apply the reset gate before the recurrent product, as first published (default: after it)')

    def architecture(self):
        from seq2seq.model import SIZES, Config, Seq2Seq, parameter_specs
        return Architecture(SIZES, Config, Seq2Seq, parameter_specs)

    def at_start(self, args):
        from pyops import backend
        return f'OMP_THREADS: {backend.threads()}\nepochs : {args.epochs}'

    def before_data(self, args, settings):
        return f'dropout : {settings["dropout"]}\nlr : {settings["lr"]}\ntiny : {settings["tiny"]}'

    def after_data(self, args, settings, found, vocabularies):
        return f'data loaded\n{found.line}'

    def epoch_line(self, values):
        return f'epoch {values["epoch"]} loss : {values["loss"]:.5f} emit_clip : {values["emit_clip"]}'

    def answer(self, read, output):
        return ' '.join(read), f'translate res : {" ".join(output)}'


PROGRAM = Seq2SeqProgram()
parse, main = PROGRAM.parse, PROGRAM.main

if __name__ == '__main__':
    with exits_cleanly('seq2seq.train'):
        main()
