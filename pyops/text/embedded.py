"""A small English-French corpus that needs no file: sentences of a grammar, the same ones every time.

It lets a program train, translate and be scored where nothing was downloaded.  Sentences are built from parts that
recur (who, which tense, what), so a model that has learned the grammar translates sentences that it has not seen.
Each English sentence has exactly one French one, so a count of exact matches is fair:
`you` is always `tu`, `they` is `ils`, and where French shows a gender, English shows it too.
Forms that English does not tell apart (`I read`: present or past) are left out.
French elision (`j'ai`, `l'eau`), contraction (`au`), agreement and word order are all there to be learned.
"""
import io
from functools import cache
from itertools import product
from math import gcd, prod
from typing import NamedTuple

from pyops.text.corpus import Corpus, tokenized
from pyops.text.preprocess import tokenize

MAX_TOKENS = 8                      # with <eos> they fill 9 steps


class _Noun(NamedTuple):
    english: str
    plural: str                     # '' where no plural is used
    french: str
    french_plural: str
    gender: str                     # 'm' or 'f'
    classes: frozenset


class _Verb(NamedTuple):
    english: tuple                  # base, third person, past, -ing
    present: tuple                  # je, tu, il, nous, ils
    future: tuple
    participle: str
    infinitive: str
    objects: frozenset = frozenset()    # classes of nouns that it goes with


class _Phrase(NamedTuple):
    """A noun phrase or pronoun."""
    english: str
    french: str
    person: int                     # 0 to 4: I, you, he or she, we, they
    gender: str                     # 'm', 'f', or '' where English does not show it
    article: str = ''               # the English determiner
    negated: str = ''               # the French words after `ne ... pas`


def _nouns(table):
    for line in table.strip().splitlines():
        english, plural, french, french_plural, gender, *classes = line.replace('-', '').split('|')
        yield _Noun(english.strip(), plural.strip(), french.strip(), french_plural.strip(), gender.strip(),
                    frozenset(classes[0].split()))


# mass: not counted.  portable: can be taken, found and had.  Class names of adjectives (paint, colour, size, age,
# quality, beauty) say which adjectives suit.
_NOUNS = tuple(_nouns("""
    bread     | -        | pain     | -        | m | mass food quality
    meat      | -        | viande   | -        | f | mass food quality
    cheese    | -        | fromage  | -        | m | mass food quality
    apple     | apples   | pomme    | pommes   | f | food quality
    cake      | -        | gâteau   | -        | m | food size quality
    egg       | eggs     | œuf      | œufs     | m | food
    water     | -        | eau      | -        | f | mass drink
    milk      | -        | lait     | -        | m | mass drink
    coffee    | -        | café     | -        | m | mass drink quality
    wine      | -        | vin      | -        | m | mass drink quality
    book      | books    | livre    | livres   | m | text portable age quality
    letter    | letters  | lettre   | lettres  | f | text portable
    newspaper | -        | journal  | -        | m | text portable age
    car       | cars     | voiture  | voitures | f | thing washable paint colour size age
    bike      | -        | vélo     | -        | m | thing washable paint colour size age
    dress     | -        | robe     | -        | f | thing washable portable paint colour age beauty
    hat       | -        | chapeau  | -        | m | thing portable paint colour size age beauty
    bag       | bags     | sac      | sacs     | m | thing portable paint colour size age
    shirt     | -        | chemise  | -        | f | thing washable portable paint colour age
    key       | keys     | clé      | clés     | f | thing portable size age
    table     | -        | table    | -        | f | thing washable support paint colour size age beauty
    chair     | -        | chaise   | -        | f | thing support paint colour size age
    house     | -        | maison   | -        | f | building inside paint colour size age beauty
    dog       | dogs     | chien    | chiens   | m | animal washable colour size beauty
    cat       | cats     | chat     | chats    | m | animal colour size beauty
    horse     | -        | cheval   | -        | m | animal washable colour size beauty
    bird      | -        | oiseau   | -        | m | animal
    boy       | boys     | garçon   | garçons  | m | human
    girl      | girls    | fille    | filles   | f | human
    man       | men      | homme    | hommes   | m | human
    woman     | women    | femme    | femmes   | f | human
    mother    | -        | mère     | -        | f | kin
    father    | -        | père     | -        | m | kin
    brother   | brothers | frère    | frères   | m | kin
    sister    | sisters  | sœur     | sœurs    | f | kin
    garden    | -        | jardin   | -        | m | building inside size beauty
    market    | -        | marché   | -        | m | place
    school    | -        | école    | -        | f | place
    beach     | -        | plage    | -        | f | place
    station   | -        | gare     | -        | f | place
    hospital  | -        | hôpital  | -        | m | place
    church    | -        | église   | -        | f | place
"""))

# English: class of nouns, before the noun in French?, masculine, feminine.
_ATTRIBUTES = {
    'red': ('paint', False, 'rouge', 'rouge'),
    'black': ('colour', False, 'noir', 'noire'),
    'white': ('colour', False, 'blanc', 'blanche'),
    'small': ('size', True, 'petit', 'petite'),
    'big': ('size', True, 'grand', 'grande'),
    'new': ('age', True, 'nouveau', 'nouvelle'),
    'old': ('age', True, 'vieux', 'vieille'),
    'good': ('quality', True, 'bon', 'bonne'),
    'beautiful': ('beauty', True, 'beau', 'belle'),
}
# Said of people.  Masculine, feminine, and their plurals.
_MOODS = {
    'tired': ('fatigué', 'fatiguée', 'fatigués', 'fatiguées'),
    'happy': ('heureux', 'heureuse', 'heureux', 'heureuses'),
    'sad': ('triste', 'triste', 'tristes', 'tristes'),
    'sick': ('malade', 'malade', 'malades', 'malades'),
    'rich': ('riche', 'riche', 'riches', 'riches'),
    'calm': ('calme', 'calme', 'calmes', 'calmes'),
}
# Masculine, feminine, plural.
_DETERMINERS = {
    'the': ('le', 'la', 'les'),
    'a': ('un', 'une', None),
    'this': ('ce', 'cette', None),
    'these': (None, None, 'ces'),
    'some': ('de le', 'de la', None),
    'two': (None, None, 'deux'),
    'three': (None, None, 'trois'),
    'my': ('mon', 'ma', 'mes'),
    'your': ('ton', 'ta', 'tes'),
    'his': ('son', 'sa', 'ses'),
    'her': ('son', 'sa', 'ses'),
    'our': ('notre', 'notre', 'nos'),
}
_POSSESSIVES = ('my', 'your', 'his', 'her', 'our')
_BEFORE_VOWEL = {'ce': 'cet', 'ma': 'mon', 'ta': 'ton', 'sa': 'son', 'vieux': 'vieil'}
_ELIDED = frozenset(('je', 'me', 'te', 'le', 'la', 'ne', 'de', 'que'))
_CONTRACTED = {('à', 'le'): 'au', ('de', 'le'): 'du'}
_VOWELS = tuple('aeiouhàâéèêîôœ')   # every h of this lexicon is mute
_DE_VOWEL = tuple(f'de {vowel}' for vowel in _VOWELS)

_PRONOUNS = (
    _Phrase('I', 'je', 0, ''), _Phrase('you', 'tu', 1, ''), _Phrase('he', 'il', 2, 'm'), _Phrase('she', 'elle', 2, 'f'),
    _Phrase('we', 'nous', 3, ''), _Phrase('they', 'ils', 4, ''),
)
# Object pronouns: French, the persons that may be the subject, and the ending of a participle after it
# (None: English does not show the gender).
_OBJECT_PRONOUNS = {
    'me': ('me', (1, 2, 4), None),
    'you': ('te', (0, 2, 3, 4), None),
    'him': ('le', (0, 1, 2, 3, 4), ''),
    'her': ('la', (0, 1, 2, 3, 4), 'e'),
    'us': ('nous', (1, 2, 4), None),
    'them': ('les', (0, 1, 2, 3), None),
}


def _verb(english, present, future, participle, infinitive, objects=''):
    """`future` is the stem with its -r, to which all verbs add the same: `manger` makes mangerai ... mangeront."""
    return _Verb(tuple(english.split()), tuple(present.split()),
                 tuple(future + ending for ending in ('ai', 'as', 'a', 'ons', 'ont')),
                 participle, infinitive, frozenset(objects.split()))


_EAT = _verb('eat eats ate eating', 'mange manges mange mangeons mangent', 'manger', 'mangé', 'manger', 'food')
_DRINK = _verb('drink drinks drank drinking', 'bois bois boit buvons boivent', 'boir', 'bu', 'boire', 'drink')
_READ = _verb('read reads read reading', 'lis lis lit lisons lisent', 'lir', 'lu', 'lire', 'text')
_WASH = _verb('wash washes washed washing', 'lave laves lave lavons lavent', 'laver', 'lavé', 'laver', 'washable')
_TAKE = _verb('take takes took taking', 'prends prends prend prenons prennent', 'prendr', 'pris', 'prendre',
              'food portable')
_FIND = _verb('find finds found finding', 'trouve trouves trouve trouvons trouvent', 'trouver', 'trouvé', 'trouver',
              'portable animal human kin')
_SEE = _verb('see sees saw seeing', 'vois vois voit voyons voient', 'verr', 'vu', 'voir',
             'thing building animal human kin')
_LIKE = _verb('like likes liked liking', 'aime aimes aime aimons aiment', 'aimer', 'aimé', 'aimer',
              'food drink text thing building animal human')
_WANT = _verb('want wants wanted wanting', 'veux veux veut voulons veulent', 'voudr', 'voulu', 'vouloir',
              'food drink text thing animal')
_HAVE = _verb('have has had having', 'ai as a avons ont', 'aur', 'eu', 'avoir', 'food text thing building animal')
_SLEEP = _verb('sleep sleeps slept sleeping', 'dors dors dort dormons dorment', 'dormir', 'dormi', 'dormir')
_WORK = _verb('work works worked working', 'travaille travailles travaille travaillons travaillent', 'travailler',
              'travaillé', 'travailler')
_SING = _verb('sing sings sang singing', 'chante chantes chante chantons chantent', 'chanter', 'chanté', 'chanter')
_GO = _verb('go goes went going', 'vais vas va allons vont', 'ir', 'allé', 'aller')
_STAY = _verb('stay stays stayed staying', 'reste restes reste restons restent', 'rester', 'resté', 'rester')
_BE = _verb('be is was being', 'suis es est sommes sont', 'ser', 'été', 'être')
_WAS = ('étais', 'étais', 'était', 'étions', 'étaient')
_CAN = ('peux', 'peux', 'peut', 'pouvons', 'peuvent')
_MUST = ('dois', 'dois', 'doit', 'devons', 'doivent')

_ACTIONS = (_EAT, _DRINK, _READ, _WASH, _TAKE, _FIND, _SEE)
_PLAIN, _NOT, _ASKED = 'plain', 'not', 'asked'
_FORMS = (_PLAIN, _NOT, _ASKED)


def _french_join(words):
    """Join French words: elide before a vowel (le eau -> l'eau), then contract (à le -> au)."""
    joined = []
    for word in ' '.join(words).split():
        if joined and joined[-1] in _ELIDED and word.startswith(_VOWELS):
            joined[-1] = f"{joined[-1][:-1]}'{word}"
        else:
            joined.append(word)
    merged = []
    for word in joined:
        if merged and (merged[-1], word) in _CONTRACTED:
            merged[-1] = _CONTRACTED[merged[-1], word]
        else:
            merged.append(word)
    return ' '.join(merged)


def _noun_phrase(article, noun, attribute=None, plural=False):
    """Return determiner + noun + at most one adjective, with agreement, and the French adjective in its place."""
    column = 2 if plural else noun.gender == 'f'
    nominal = [noun.french_plural if plural else noun.french]
    if attribute:
        _, before, *forms = _ATTRIBUTES[attribute]
        nominal.insert(0 if before else 1, forms[noun.gender == 'f'])
    words = [_DETERMINERS[article][column], *nominal]
    for place in range(len(words) - 1):
        if words[place + 1].startswith(_VOWELS):
            words[place] = _BEFORE_VOWEL.get(words[place], words[place])
    french = ' '.join(words)
    english = [word for word in (article, attribute, noun.plural if plural else noun.english) if word]
    if article == 'a' and english[1].startswith(tuple('aeiou')):
        english[0] = 'an'
    negated = ' '.join(['de', *words[1:]]) if article == 'a' else french
    return _Phrase(' '.join(english), french, 4 if plural else 2, noun.gender, article, negated)


def _suits(article, noun):
    """Say whether people use this determiner with this noun: no `two breads`, no `the brother`, no `my station`."""
    if article in ('a', 'two', 'three'):
        return 'mass' not in noun.classes
    if article in ('the', 'this', 'these'):
        return 'kin' not in noun.classes
    if article in _POSSESSIVES:
        return not noun.classes & {'mass', 'human', 'place'}
    return 'mass' in noun.classes                           # some


def _phrases(classes, articles=tuple(_DETERMINERS)):
    """Return all phrases of the nouns of these classes with these determiners, bare and with an adjective."""
    phrases = []
    for noun, article in product(_NOUNS, articles):
        if not noun.classes & classes or not _suits(article, noun):
            continue
        if _DETERMINERS[article][0]:
            phrases.append(_noun_phrase(article, noun))
            phrases += [_noun_phrase(article, noun, attribute) for attribute, (of, *_) in _ATTRIBUTES.items()
                        if of in noun.classes]
        if noun.plural and _DETERMINERS[article][2]:
            phrases.append(_noun_phrase(article, noun, plural=True))
    return phrases


def _people():
    """Return the subjects that act, by person."""
    articles = ('the', 'this', 'these', *_POSSESSIVES)
    people = [*_PRONOUNS, *_phrases({'human', 'kin'}, articles)]
    people += [_noun_phrase(article, noun, 'old') for noun in _NOUNS if noun.english in ('man', 'woman')
               for article in ('the', 'this')]
    return [[phrase for phrase in people if phrase.person == person] for person in range(5)]


def _english(subject, tense, form, verb, rest):
    """Return the English words of a sentence; `tense` is also progressive, want, can, must."""
    base, third, past, ing = verb.english
    single = subject.person == 2
    be = 'am' if subject.person == 0 else 'is' if single else 'are'
    was = 'was' if subject.person in (0, 2) else 'were'
    do = 'does' if single else 'do'
    helper, bare, finite = {
        'present': (do, base, third if single else base),
        'progressive': (be, ing, None),
        'past': ('did', base, past),
        'future': ('will', base, None),
        'want': (do, f'want to {base}', f'{"wants" if single else "want"} to {base}'),
        'can': ('can', base, None),
        'must': ('must', base, None),
    }[tense]
    if verb is _BE and tense in ('present', 'past'):
        helper, bare, finite = (be if tense == 'present' else was), '', None
    if form == _ASKED:
        return [helper, subject.english, bare, rest]
    if form == _NOT:
        helper = {'am': 'am not', 'will': "won't", 'can': "can't"}.get(helper, f"{helper}n't")
    elif finite:
        return [subject.english, finite, rest]
    return [subject.english, helper, bare, rest]


def _french(subject, tense, form, verb, rest, pronoun='', ending=''):
    """Return the French words; an object pronoun stands before the verb that it belongs to."""
    person = subject.person
    second = ''
    if tense in ('present', 'progressive'):
        first = verb.present[person]
    elif tense == 'future':
        first = verb.future[person]
    elif tense == 'past' and verb is _BE:
        first = _WAS[person]
    elif tense == 'past':
        helper = _BE if verb in (_GO, _STAY) else _HAVE
        first, second = helper.present[person], verb.participle + ending
    else:
        first, second = {'want': _WANT.present, 'can': _CAN, 'must': _MUST}[tense][person], verb.infinitive
        second, pronoun = f'{pronoun} {second}', ''
    group = ['ne', pronoun, first, 'pas', second] if form == _NOT else [pronoun, first, second]
    return [*(['est-ce', 'que'] if form == _ASKED else []), subject.french, *group, rest]


def _agreement(subject):
    """Return the ending of a participle or adjective that agrees with the subject; None if English hides the gender."""
    return ('e' if subject.gender == 'f' else '') + ('s' if subject.person > 2 else '') if subject.gender else None


def _mood(subject, mood):
    """Return the French adjective that agrees with the subject, None if that would need a gender that is not known."""
    forms = _MOODS[mood]
    if not subject.gender and forms[0] != forms[1]:
        return None
    return forms[2 * (subject.person > 2) + (subject.gender == 'f')]


def _stride(total):
    """Return a step that visits all of 0..total-1 (modulo total); near the golden ratio, it leaves no large gaps."""
    stride = max(1, round(0.618 * total))
    while gcd(stride, total) > 1:
        stride += 1
    return stride


class _Collection:
    """Sentences so far, by their English."""

    def __init__(self):
        self.french = {}

    def add(self, english, french, mark):
        """Add a sentence of words.  Return whether it is new and fits."""
        english = ' '.join(' '.join(english).split())
        french = _french_join(french)
        if max(len(english.split()), len(french.split())) + 1 > MAX_TOKENS:
            return False
        english = english[0].upper() + english[1:] + mark
        if english in self.french:
            return False
        # French sets a narrow no-break space before ! and ?.
        self.french[english] = french[0].upper() + french[1:] + (mark if mark == '.' else '\u202f' + mark)
        return True

    def choose(self, count, make, *axes):
        """Add up to `count` of the sentences make(*choice), spread evenly over the product of the axes.

        make returns (English words, French words, mark), or None for a choice that is no good sentence.
        """
        axes = [tuple(axis) for axis in axes]
        total = prod(map(len, axes))
        stride = _stride(total)
        place = 7 * len(self.french)
        for _ in range(total):
            rest, choice = place % total, []
            for axis in axes:
                rest, index = divmod(rest, len(axis))
                choice.append(axis[index])
            sentence = make(*choice)
            if sentence and self.add(*sentence):
                count -= 1
                if not count:
                    return
            place += stride


def _sentence(subject, tense, form, verb, english_rest, french_rest, **french):
    return (_english(subject, tense, form, verb, english_rest),
            _french(subject, tense, form, verb, french_rest, **french), '?' if form == _ASKED else '.')


def _settings(verbs, tenses):
    """Yield ([verb], [tense], [form], person) for all that are in use, each list an axis of one choice."""
    for verb, tense, person, form in product(verbs, tenses, range(5), _FORMS):
        # Nobody asks `do I eat`; `must not` would need a note on its meaning.
        if not (tense == 'must' and form != _PLAIN or form == _ASKED and person == 0 and tense != 'can'):
            yield [verb], [tense], [form], person


_TENSES = ('present', 'progressive', 'past', 'future', 'want', 'can', 'must')
_WHEN = {'present': [('today', "aujourd'hui")], 'progressive': [('now', 'maintenant')],
         'past': [('yesterday', 'hier')], 'future': [('tomorrow', 'demain')], 'want': [], 'can': [], 'must': []}


def _add_objects(found, people):
    """I eat the apple, he didn't see the black dog, will you take my bag?"""
    def make(verb, tense, form, subject, thing, when):
        if subject.english == thing.english or form == _NOT and (
                thing.article in ('some', 'two', 'three') or thing.negated.startswith(_DE_VOWEL)):
            return None
        if verb is _READ and form == _PLAIN and (tense == 'past' or tense == 'present' and subject.person != 2):
            return None
        return _sentence(subject, tense, form, verb, f'{thing.english} {when[0]}',
                         f'{thing.negated if form == _NOT else thing.french} {when[1]}')

    def add(verb, tenses, things, count):
        for *setting, person in _settings([verb], tenses):
            when = [('', ''), ('', '')]
            if verb in _ACTIONS and setting[1][0] != 'present':
                when += _WHEN[setting[1][0]]
            # `eats` occurs nowhere else, while `eat` serves questions and negations too.
            third = person == 2 and setting[1:] == [['present'], [_PLAIN]]
            found.choose(count * (1 + third), make, *setting, people[person], things, when)

    for verb in _ACTIONS:
        # One is not seeing a bag; and one finds rather than is finding it.
        tenses = [tense for tense in _TENSES if verb not in (_SEE, _FIND) or tense != 'progressive']
        add(verb, tenses, _phrases(verb.objects), 8)
    add(_LIKE, ['present'], _phrases(_LIKE.objects, ('the', 'this', *_POSSESSIVES)), 30)
    add(_WANT, ['present'], _phrases(_WANT.objects), 30)
    add(_HAVE, ['present'], _phrases(_HAVE.objects) + _phrases({'kin'}, ('a', 'two', 'three')), 30)
    add(_HAVE, ['want', 'can'], _phrases(_HAVE.objects), 6)


def _add_pronoun_objects(found, people):
    """I see him, they didn't find her, can you see us?"""
    def make(verb, tense, form, subject, item, when):
        pronoun, (french, persons, ending) = item
        if subject.person not in persons or tense == 'past' and ending is None:
            return None
        return _sentence(subject, tense, form, verb, f'{pronoun} {when[0]}', when[1],
                         pronoun=french, ending=ending or '')

    for *setting, person in _settings((_SEE, _FIND), [tense for tense in _TENSES if tense != 'progressive']):
        tense = setting[1][0]
        when = [('', ''), *_WHEN[tense]]
        found.choose(12 if tense == 'past' else 5, make, *setting, people[person], _OBJECT_PRONOUNS.items(), when)


def _add_actions(found, people):
    """They sleep, the old man isn't working now, did you sing with my sister?"""
    company = [(f'with {phrase.english}', f'avec {phrase.french}') for phrase in
               [*_phrases({'kin'}, ('my', 'your', 'his', 'her', 'our')), *_phrases({'human'}, ('the', 'this'))]]

    def make(verb, tense, form, subject, when):
        return _sentence(subject, tense, form, verb, *when)

    for *setting, person in _settings((_SLEEP, _WORK, _SING), _TENSES):
        when = [('', ''), ('here', 'ici'), *_WHEN[setting[1][0]], ('in the garden', 'dans le jardin'),
                ('in the house', 'dans la maison')]
        if setting[0][0] is not _SLEEP:
            when += company
        found.choose(10 if setting[1][0] in ('future', 'present') else 5, make, *setting, people[person], when)


def _add_motion(found, people):
    """She went to the market, we are staying at the hospital."""
    def make(verb, tense, form, subject, place, when):
        ending = _agreement(subject)
        if tense == 'past' and ending is None:
            return None
        return _sentence(subject, tense, form, verb, f'{"to" if verb is _GO else "at"} {place.english} {when[0]}',
                         f'à {place.french} {when[1]}', ending=ending or '')

    places = _phrases({'place'}, ('the',))
    for *setting, person in _settings((_GO, _STAY), _TENSES):
        tense = setting[1][0]
        found.choose({'past': 30, 'future': 12, 'present': 12}.get(tense, 7), make, *setting, people[person], places,
                     [('', ''), *_WHEN[tense]])


def _add_descriptions(found, people):
    """My sisters are tired, was the dress black?"""
    def make_mood(verb, tense, form, subject, mood):
        adjective = _mood(subject, mood)
        return adjective and _sentence(subject, tense, form, verb, mood, adjective)

    def make_look(tense, form, article, look):
        noun, attribute = look
        thing = _noun_phrase(article, noun)
        return _sentence(thing, tense, form, _BE, attribute, _ATTRIBUTES[attribute][2 + (noun.gender == 'f')])

    for *setting, person in _settings([_BE], ('present', 'past', 'future')):
        found.choose(26 if person in (2, 4) else 12, make_mood, *setting, people[person], _MOODS)
    looks = [(noun, attribute) for noun in _NOUNS for attribute, (of, *_) in _ATTRIBUTES.items()
             if of in noun.classes & {'paint', 'colour', 'size'}]
    for tense, form in product(('present', 'past'), _FORMS):
        found.choose(70, make_look, [tense], [form], ('the', 'this', *_POSSESSIVES), looks)


def _add_locations(found, people):
    """The key is under the table, where was my brother?"""
    def make(verb, tense, form, thing, where):
        return _sentence(thing, tense, form, verb, *where)

    def make_where(thing, tense):
        english = ['where', _english(thing, tense, _ASKED, _BE, '')[0], thing.english]
        verb = (_WAS if tense == 'past' else _BE.present)[thing.person]
        # A noun stands behind the verb, a pronoun keeps its place after est-ce que.
        french = ['où', 'est-ce', 'que', thing.french, verb] if thing in _PRONOUNS else ['où', verb, thing.french]
        return english, french, '?'

    movable = [phrase for phrase in _phrases({'portable', 'animal'}, ('the', 'this', *_POSSESSIVES))
               if len(phrase.english.split()) == 2]
    furniture = [(f'{english} {phrase.english}', f'{french} {phrase.french}') for (english, french), phrase in product(
        (('on', 'sur'), ('under', 'sous'), ('behind', 'derrière')), _phrases({'support'}, ('the', 'my')))]
    places = [*((f'in {phrase.english}', f'dans {phrase.french}') for phrase in _phrases({'inside'}, ('the', 'my'))),
              *((f'at {phrase.english}', f'à {phrase.french}') for phrase in _phrases({'place'}, ('the',)))]
    for tense, form in product(('present', 'past'), _FORMS):
        found.choose(60, make, [_BE], [tense], [form], movable, furniture)
    for *setting, person in _settings([_BE], ('present', 'past', 'future')):
        found.choose(14, make, *setting, people[person], places)
    found.choose(80, make_where, [*movable, *(phrase for group in people[1:] for phrase in group)],
                 ('present', 'past'))


def _add_questions(found, people):
    """Who drank the wine, what is he eating, where are you going, why are they sad?"""
    def make_who(verb, thing, tense):
        anyone = _Phrase('who', 'qui', 2, '')
        return (_english(anyone, tense, _PLAIN, verb, thing.english),
                _french(anyone, tense, _PLAIN, verb, thing.french), '?')

    def make_what(verb, subject, tense):
        return (['what', *_english(subject, tense, _ASKED, verb, '')],
                ["qu'est-ce", 'que', *_french(subject, tense, _PLAIN, verb, '')], '?')

    def make_why(mood, subject, tense):
        adjective = _mood(subject, mood)
        return adjective and (['why', *_english(subject, tense, _ASKED, _BE, mood)],
                              ['pourquoi', *_french(subject, tense, _ASKED, _BE, adjective)], '?')

    def make_going(subject, tense):
        return (['where', *_english(subject, tense, _ASKED, _GO, '')],
                ['où', *_french(subject, tense, _ASKED, _GO, '')], '?')

    anybody = [subject for group in people[1:] for subject in group]
    for verb in _ACTIONS:
        found.choose(20, make_who, [verb], _phrases(verb.objects), ('past', 'future'))
        found.choose(18, make_what, [verb], anybody, ('present', 'past', 'future'))
    found.choose(60, make_why, _MOODS, anybody, ('present', 'past'))
    found.choose(24, make_going, anybody, ('progressive', 'future'))


def _add_orders(found):
    """Eat your apple! Don't take the key! Let's go to the beach!"""
    def make(verb, manner, rest):
        base, (english, french) = verb.english[0], rest
        order = 'va' if verb is _GO else verb.present[0]    # otherwise spelled like the first person
        return {'do': ([base, english], [order, french], '!'),
                "don't": (["don't", base, english], ['ne', order, 'pas', french], '!'),
                "let's": (["let's", base, english], [verb.present[3], french], '!')}[manner]

    manners = ('do', "don't", "let's")
    for verb in (_EAT, _DRINK, _READ, _WASH, _TAKE):
        found.choose(36, make, [verb], manners, [(phrase.english, phrase.french) for phrase in
                                                 _phrases(verb.objects, ('the', 'this', *_POSSESSIVES))])
    for verb, preposition in ((_GO, 'to'), (_STAY, 'at')):
        found.choose(36, make, [verb], manners, [(f'{preposition} {phrase.english}', f'à {phrase.french}')
                                                 for phrase in _phrases({'place'}, ('the',))])
    for verb in (_SLEEP, _WORK, _SING):
        found.choose(6, make, [verb], manners, [('', ''), ('here', 'ici')])


@cache
def _collect():
    """Make all sentences.  How many of each setting is chosen so that every form of every word is seen often."""
    found = _Collection()
    people = _people()
    for add in (_add_objects, _add_pronoun_objects, _add_actions, _add_motion, _add_descriptions, _add_locations,
                _add_questions):
        add(found, people)
    _add_orders(found)
    # Shorter first, as in the Tatoeba files; among equals, kinds are mixed by a stride through their order.
    made = list(found.french.items())
    stride = _stride(len(made))
    mixed = [made[place * stride % len(made)] for place in range(len(made))]
    return tuple(sorted(mixed, key=lambda pair: len(tokenize(pair[0]))))


def pairs():
    """Return the list of (English, French) sentences, raw text: some ten thousand, no English sentence twice."""
    return list(_collect())


def corpus():
    """Return the sentences as a Corpus named 'embedded'."""
    return Corpus.kept('embedded', io.BytesIO(), lambda: tokenized(_collect()), __name__)
