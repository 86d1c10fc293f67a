"""Settings of a training run: flags take precedence over the checkpoint, then the preset, then the program's defaults.

Imports nothing large, so that --help is quick.
"""
import dataclasses

from pyops.errors import UserError


def add_setting(group, defaults, *flags, help, type=None, metavar='N', choices=None):
    """Add the flag of a setting to a group of a parser; --help names its default.  Without the flag its value is None.

    type, metavar: of a number;  choices: the accepted words
    """
    name = flags[-1].removeprefix('--').replace('-', '_')
    group.add_argument(*flags, type=type, metavar=None if choices else metavar, choices=choices,
                       help=f'{help} (default {defaults[name]})')


def add_preset_flag(group, presets):
    """Add --preset NAME.  presets: {name: values that replace defaults}; the first is the default."""
    first, *others = presets
    texts = [f'{name}: ' + ', '.join(setting.replace('_', '-') + ('' if value is True else f' {value}')
                                     for setting, value in presets[name].items()) for name in others]
    group.add_argument('--preset', choices=list(presets),
                       help=f'set of defaults; {"; ".join(texts)} (default {first})')


def resolve(args, found, defaults, sizes, fixed, presets=None):
    """Return the settings as a dict: one for each name in `defaults`, `preset` if there are presets, and the quantization.

    args: the parsed flags, None where a flag was not given.  found: the checkpoint.Found of the run.
    UserError if a setting in `sizes` or `fixed` differs from the checkpoint's, or the preset has another size.
    """
    from pyops import quantization  # not at the top: it needs the library
    stored = found.state['settings'] if found.state else {}

    def refuse(name, value):
        flag, was = '--' + name.replace('_', '-'), f'with {stored[name]}'
        given = f'{flag} {value}'
        if isinstance(value, bool):                     # a flag without a value
            given, was = (flag, 'without it') if value else (f'--no-{flag[2:]}', f'with {flag}')
            flag = given
        elif name == 'pairs' and not stored[name]:
            was = 'with all pairs'
        raise UserError(f'{given}: {found.path} was trained {was}; leave {flag} out, or give another folder with -c')

    settings, is_another = {}, False
    if presets:
        preset = settings['preset'] = args.preset or stored.get('preset') or next(iter(presets))
        defaults, is_another = defaults | presets.get(preset, {}), stored.get('preset', preset) != preset
    for name, default in defaults.items():
        given = getattr(args, name, None)
        settings[name] = stored.get(name, default) if given is None else given
        if (name in sizes or name in fixed) and name in stored and settings[name] != stored[name]:
            refuse(name, settings[name])
        if name in sizes and is_another and given is None and settings[name] != default:
            refuse('preset', preset)
    return settings | quantization.resolve(args, found.state and stored)


def configure(Config, settings, *sizes):
    """Return Config(*sizes, ...), a dataclass, with the settings that it has fields for.  UserError if they contradict."""
    from pyops import quantization
    fields = [field.name for field in dataclasses.fields(Config)]
    ops = None
    if compute := settings.get('compute'):              # of a translator; training runs have none
        from pyops.compute import family
        ops = family(compute, settings.get('quant', 'none'))
    return Config(*sizes, **{name: settings[name] for name in fields if name in settings},
                  ops=ops or quantization.family_of(settings))
