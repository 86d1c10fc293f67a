"""Completion of commands, programs and flags in a shell: `pyops completion bash|zsh` prints the script."""
import argparse
import shlex

# `command` grows by each word that is a command of the command so far: '', ' train', ' train mnist'.  Other words are flags and
# their values.  Where `answers` is empty the shell completes file names.
_CHOOSE = '''\
    for word in "${{typed[@]}}"; do
        case "$command $word" in
            {commands}) command="$command $word";;
        esac
    done
    case "$command" in
{words}
    esac
    case "$command $previous" in
{values}
    esac
'''
_BASH = '''\
_pyops() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" command= word answers
    local typed=("${{COMP_WORDS[@]:1:COMP_CWORD-1}}")
''' + _CHOOSE + '''\
    COMPREPLY=($(compgen -W "$answers" -- "$current"))
}}
complete -o default -F _pyops pyops
'''
_ZSH = '''\
_pyops() {{
    local previous="${{words[CURRENT-1]}}" command= word answers
    local -a typed=("${{(@)words[2,CURRENT-1]}}")
''' + _CHOOSE + '''\
    [[ -n $answers ]] && compadd -- ${{=answers}} || _files
}}
compdef _pyops pyops
'''
SHELLS = {'bash': _BASH, 'zsh': _ZSH}


def add_flags(parser):
    """Declare the flags of the command."""
    parser.add_argument('shell', choices=SHELLS, metavar='SHELL', help=' or '.join(SHELLS))


def script(shell, parser, programs):
    """Return the completion script of a shell.

    parser: of pyops;  programs: {command: its parser} for commands whose flags `parser` does not know, such as 'train mnist'
    """
    parsers = dict(_commands('', parser))
    for name, program in programs.items():
        parsers |= dict(_commands(f' {name}', program))
    words = {command: [] for command in parsers}
    for command in parsers:
        if command:
            start, _, word = command.rpartition(' ')
            words[start].append(word)
    for command, found in parsers.items():
        for action in found._actions:
            words[command] += [flag for flag in action.option_strings if flag.startswith('--')]
            if action.choices and not action.option_strings:
                words[command] += map(str, action.choices)
    values = {f'{command} {flag}': map(str, action.choices) for command, found in parsers.items()
              for action in found._actions if action.choices for flag in action.option_strings}
    return SHELLS[shell].format(commands=' | '.join(shlex.quote(command) for command in parsers if command),
                                words=_cases(words), values=_cases(values))


def _cases(answers):
    """Return the lines of a `case` in shell.   answers: {pattern: words}"""
    return '\n'.join(f'        {shlex.quote(pattern)}) answers={shlex.quote(" ".join(dict.fromkeys(words)))};;'
                     for pattern, words in answers.items())


def _commands(command, parser):
    """Yield the command and the parser of `parser` and of all its subcommands."""
    yield command, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, child in action.choices.items():
                yield from _commands(f'{command} {word}', child)
