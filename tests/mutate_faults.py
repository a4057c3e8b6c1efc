"""Finds lines of C and CUDA sources in which a fault can be planted, and creates the changed lines."""
import os
import random
import re
from collections import Counter, namedtuple

# One planted fault: the line `before` at `path`:`line` becomes `after`. `id` is a number, or FOLDER+N for a spare. `above` is
# the result of line_above().
Fault = namedtuple('Fault', 'id room path line operator before after above')

SOURCES = ('.c', '.h', '.cu', '.cuh')
ROOTS = ('src', 'cpu', 'mpi', 'cuda')


def rooms_of(tree):
    """Returns {room: [paths]}. A room is a folder that directly contains sources; its name is its path in the tree."""
    rooms = {}
    for root in ROOTS:
        for folder, _, names in os.walk(os.path.join(tree, root)):
            room = os.path.relpath(folder, tree)
            paths = sorted(f'{room}/{name}' for name in names if name.endswith(SOURCES))
            if paths and room != 'src':  # src/ itself contains only main.c
                rooms[room] = paths
    return dict(sorted(rooms.items()))


def code_only(text):
    """Returns the text with comments, strings, characters and preprocessor lines replaced by blanks. Positions do not change."""
    pattern = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|'
                         r'^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.S | re.M)
    return pattern.sub(lambda found: re.sub(r'[^\n]', ' ', found.group()), text)


# ---- Operators ----
# The parameters of an operator are a random generator, a line, and the results of code_only() for this line and for all lines
# above it. An operator yields one changed line for each place that it can change.

RELATIONS = {'<': ['<=', '>='], '<=': ['<', '>'], '>': ['>=', '<='], '>=': ['>', '<'], '==': ['!='], '!=': ['==']}
ARITHMETIC = {'+': '-', '-': '+', '*': '/', '/': '*', '%': '*', '+=': '-=', '-=': '+=', '*=': '/=', '/=': '*='}
BITS = {'<<': '>>', '>>': '<<', '&': '|', '|': '&', '^': '&', '|=': '&=', '&=': '|=', '<<=': '>>=', '>>=': '<<='}
SYMBOL = re.compile(r'<<=|>>=|<<<|>>>|->|\+\+|--|&&|\|\||<=|>=|==|!=|<<|>>|[-+*/%&|^]=|[-+*/%&|^<>]')


def symbols(code, table):
    """Yields (start, end, symbol) for each binary symbol of a table. clang-format puts spaces only around binary symbols."""
    for found in SYMBOL.finditer(code):
        start, end = found.span()
        if found.group() in table and code[start - 1:start] in ('', ' ') and code[end:end + 1] in ('', ' '):
            yield start, end, found.group()


def put(text, start, end, new):
    return text[:start] + new + text[end:]


def relation(draw, text, code, _):
    for start, end, symbol in symbols(code, RELATIONS):
        yield put(text, start, end, draw.choice(RELATIONS[symbol]))


def arithmetic(_draw, text, code, _):
    for start, end, symbol in symbols(code, ARITHMETIC):
        yield put(text, start, end, ARITHMETIC[symbol])


def bits(_draw, text, code, _):
    for start, end, symbol in symbols(code, BITS):
        yield put(text, start, end, BITS[symbol])


def logic(_draw, text, code, _):
    for found in re.finditer(r'&&|\|\|', code):
        yield put(text, found.start(), found.end(), '||' if found.group() == '&&' else '&&')


def constant(draw, text, code, _):
    number = r'(?<![\w.])(0[xX][0-9a-fA-F]+|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+)([uUlLfF]*)(?![\w.])'
    for found in re.finditer(number, code):
        digits, suffix = found.groups()
        if re.fullmatch(r'0[xX][0-9a-fA-F]+|\d+', digits) and 'f' not in suffix.lower():
            value = int(digits, 0) if digits == '0' or not digits.startswith('0') or 'x' in digits.lower() else int(digits, 8)
            value += draw.choice([-1, 1]) if value > 0 else 1
            new = (hex(value) if 'x' in digits.lower() else str(value)) + suffix
        else:
            new = f'({found.group()} + 1)' if float(digits) == 0 else draw.choice([f'({found.group()} / 2)', f'({found.group()} * 2)'])
        yield put(text, found.start(), found.end(), new)


def minmax(_draw, text, code, _):
    names = {'fmax': 'fmin', 'fmaxf': 'fminf', 'max': 'min', 'MAX': 'MIN', 'atomicMax': 'atomicMin'}
    names.update({value: key for key, value in names.items()})
    for found in re.finditer(r'\b(%s)(?=\()' % '|'.join(names), code):
        yield put(text, found.start(), found.end(), names[found.group()])


def boolean(_draw, text, code, _):
    for found in re.finditer(r'\b(true|false)\b', code):
        yield put(text, found.start(), found.end(), 'false' if found.group() == 'true' else 'true')


def closing(code, start):
    """Returns the position of the bracket that closes the one at `start`, or None if it is not on this line."""
    depth = 0
    for i in range(start, len(code)):
        depth += {'(': 1, ')': -1}.get(code[i], 0)
        if depth == 0:
            return i
    return None


def conditions(code):
    for found in re.finditer(r'\b(?:if|while)\s*(\()', code):
        end = closing(code, found.start(1))
        if end is not None:
            yield found.start(1), end + 1


def negate(_draw, text, code, _):
    for start, end in conditions(code):
        yield put(text, start, end, f'(!{text[start:end]})')


def condition(draw, text, code, _):
    for start, end in conditions(code):
        yield put(text, start, end, draw.choice([f'({text[start:end]} && 0)', f'({text[start:end]} || 1)']))


def is_statement(code, lines_before):
    """Returns whether a line is one complete statement other than a declaration, a return, or a release of memory or a file."""
    line = code.strip()
    if not code.startswith(' ') or not re.match(r'[A-Za-z_*+(-].*;$', line) or line.count('(') != line.count(')') or line.count(';') != 1:
        return False
    if re.match(r'(return|goto|else|case|default|typedef|struct|enum|static|const|extern|free|close|fclose)\b', line):
        return False
    if re.match(r'(const |unsigned |struct |enum )?\w+(\s+\**|\s*\*+)\w+(\[.*\])?\s*(=.*|,.*)?;$', line):
        return False
    previous = next((line for line in reversed(lines_before) if line.strip()), '')
    return bool(re.search(r'([;{}):]|\belse|\bdo)\s*$', previous))


# Calls that release memory or a handle. choose() does not drop them, because no result depends on them.
RELEASE = re.compile(r'\s*(\(void\)\s*)?\w*(free|close|destroy|munmap)\w*\(', re.I)


def statement(_draw, text, code, lines_before):
    if is_statement(code, lines_before):
        indent = len(text) - len(text.lstrip())
        yield text[:indent] + ';'


def early(_draw, text, code, lines_before):
    """Inserts `return STATUS_OK;` before a statement of a function that returns a status."""
    if not is_statement(code, lines_before):
        return
    for line in reversed(lines_before):
        if re.match(r'[A-Za-z_].*\(', line):
            if re.match(r'(static )?(inline )?enum status\b', line):
                indent = len(text) - len(text.lstrip())
                yield text[:indent] + 'return STATUS_OK; ' + text[indent:]
            return
        if line.startswith('}'):
            return


def system_call(_draw, text, code, _):
    """Replaces a system call that protects data or their order by 0, its result on success."""
    for found in re.finditer(r'\b(fsync|fdatasync|fflush|flock|ftruncate|rename|msync|fcntl)(\()', code):
        end = closing(code, found.start(2))
        if end is not None and re.match(r'\s', code[:found.start()] or ' '):
            yield put(text, found.start(), end + 1, '0')


OPERATORS = {'relation': relation, 'arithmetic': arithmetic, 'bits': bits, 'and/or': logic, 'constant': constant,
             'min/max': minmax, 'boolean': boolean, 'negated condition': negate, 'fixed condition': condition,
             'statement dropped': statement, 'early success': early, 'system call dropped': system_call}


# ---- The list ----
# The list has no line numbers, so it stays valid when lines move. It identifies a line by its text. If this text occurs
# several times in the file, the list also has an earlier line whose text occurs only once. The fault is then in the
# first match after that line.

def line_above(lines, at, counts):
    """Returns '' if the text of line `at` occurs once, otherwise the earlier line that identifies it, or None if there is none.
    `lines` have no indentation. `counts` tells how often each text occurs."""
    if counts[lines[at]] == 1:
        return ''
    for line in reversed(lines[:at]):
        if line == lines[at]:
            return None
        if line and counts[line] == 1:
            return line
    return None


def find_line(lines, before, above):
    """Returns the index of the line that `before` and line_above() identify. ValueError if there is not exactly one."""
    unique = above or before
    if lines.count(unique) != 1:
        raise ValueError(f'it has {lines.count(unique)} lines "{unique}", not one')
    first = lines.index(unique)
    if before not in lines[first:]:
        raise ValueError(f'it has no line "{before}" after "{above}"')
    return lines.index(before, first)


def places(tree, paths, draw):
    """Returns {operator: [(path, line number, before, after, line above)]} for all lines of these files."""
    found = {name: [] for name in OPERATORS}
    for path in paths:
        with open(os.path.join(tree, path), encoding='utf-8') as file:
            text = file.read()
        before, code = text.split('\n'), code_only(text).split('\n')
        plain = [line.strip() for line in before]
        counts = Counter(plain)
        for i, line in enumerate(code):
            if not line.strip() or '_Static_assert' in line or 'static_assert' in line:
                continue
            above = line_above(plain, i, counts)
            if above is None:
                continue
            for name, operator in OPERATORS.items():
                for after in operator(draw, before[i], line, code[:i]):
                    if after != before[i]:
                        found[name].append((path, i + 1, before[i], after, above))
    return found


def choose(tree, seed, count, spares, pattern='.'):
    """Returns `count` faults, distributed evenly over the folders whose name matches, and `spares` more per folder. To choose a
    fault, draws an operator and then a line of the folder to which it applies. Rare operators therefore occur too. No line is
    used twice."""
    rooms = {room: paths for room, paths in rooms_of(tree).items() if re.search(pattern, room)}
    if not rooms:
        raise ValueError(f'no folder matches {pattern!r}')
    draw = random.Random(seed)
    extra = set(draw.sample(sorted(rooms), count % len(rooms)))
    faults, reserve = [], []
    for room, paths in rooms.items():
        found, taken = places(tree, paths, draw), set()
        share = count // len(rooms) + (room in extra)
        while len(taken) < share + spares and any(found.values()):
            name = draw.choice([name for name in OPERATORS if found[name]])
            path, line, before, after, above = found[name].pop(draw.randrange(len(found[name])))
            if (path, line) in taken or name == 'statement dropped' and RELEASE.match(before):
                continue
            taken.add((path, line))
            number = len(faults) + 1 if len(taken) <= share else f'{room}+{len(taken) - share}'
            (faults if len(taken) <= share else reserve).append(Fault(str(number), room, path, line, name, before, after, above))
    return faults + reserve


def write_list(faults, seed, out):
    print(f'# Planted faults of seed {seed}; tests/mutate.py --run tests them. Spares (FOLDER+N) replace, in order, faults of\n'
          '# their folder that do not compile or do not change the object code. Columns: fault, file, operator, line without the\n'
          '# fault, line with it. If the line occurs several times in the file, the last column is an earlier line that occurs\n'
          '# only once; the fault is in the first match after it.', file=out)
    for fault in faults:
        columns = [fault.id, fault.path, fault.operator, fault.before.strip(), fault.after.strip()]
        print('\t'.join(columns + [fault.above] * bool(fault.above)), file=out)


def read_list(path, tree):
    """Returns the faults of a list, and one message for each fault that is omitted because its line is not found."""
    faults, omitted = [], []
    with open(path, encoding='utf-8') as file:
        for row in file:
            if row.startswith('#') or not row.strip():
                continue
            number, source, operator, before, after, *above = row.rstrip('\n').split('\t')
            try:
                with open(os.path.join(tree, source), encoding='utf-8') as text:
                    lines = text.read().split('\n')
                at = find_line([line.strip() for line in lines], before, *above or [''])
            except (OSError, ValueError) as error:
                omitted.append(f'{path}: fault {number}: {source}: {error}')
                continue
            indent = len(lines[at]) - len(lines[at].lstrip())
            faults.append(Fault(number, os.path.dirname(source), source, at + 1, operator, lines[at], lines[at][:indent] + after,
                                *above or ['']))
    return faults, omitted
