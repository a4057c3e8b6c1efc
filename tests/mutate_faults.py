"""Finds lines of C, CUDA and Python files in which a fault can be planted, and writes and reads lists of such faults."""
import ast
import copy
import fnmatch
import os
import random
import re
from collections import Counter, namedtuple

# A planted fault: in the file `path`, the line `before` becomes `after`. If `before` occurs several times in the file, the
# fault is in the one that follows the line `above`. Lines have no indentation here. A spare replaces a fault of its room.
Fault = namedtuple('Fault', 'room spare path operator before after above')

# ---- Operators for C and CUDA ----
# Each operator takes a random generator, a line, and the results of code_only() for this line and for the lines above it.
# It yields (start, end, new text) for each place that it can change.

SWAPS = {'relation': {'<': ['<=', '>='], '<=': ['<', '>'], '>': ['>=', '<='], '>=': ['>', '<'], '==': ['!='], '!=': ['==']},
         'arithmetic': {'+': ['-'], '-': ['+'], '*': ['/'], '/': ['*'], '%': ['*'], '+=': ['-='], '-=': ['+='], '*=': ['/='], '/=': ['*=']},
         'bits': {'<<': ['>>'], '>>': ['<<'], '&': ['|'], '|': ['&'], '^': ['&'], '|=': ['&='], '&=': ['|='], '<<=': ['>>='], '>>=': ['<<=']},
         'and/or': {'&&': ['||'], '||': ['&&']}}
WORDS = {'boolean': {'true': 'false', 'false': 'true'},
         'min/max': {'fmax': 'fmin', 'fmin': 'fmax', 'fmaxf': 'fminf', 'fminf': 'fmaxf', 'max': 'min', 'min': 'max', 'MAX': 'MIN',
                     'MIN': 'MAX', 'atomicMax': 'atomicMin', 'atomicMin': 'atomicMax'}}
SYMBOL = re.compile(r'<<=|>>=|<<<|>>>|->|\+\+|--|&&|\|\||<=|>=|==|!=|<<|>>|[-+*/%&|^]=|[-+*/%&|^<>]')
NUMBER = re.compile(r'(?<![\w.])(0[xX][0-9a-fA-F]+|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+)([uUlLfF]*)(?![\w.])')
PROTECTING = re.compile(r'(?<=\s)(fsync|fdatasync|fflush|flock|ftruncate|rename|msync|fcntl)(\()')  # they return 0 on success
# Dropping a call that releases memory or a handle changes no result; `make check SAN=1` detects leaks.
RELEASE = re.compile(r'(\(void\)\s*)?\w*(free|close|destroy|munmap)\w*\(', re.I)


def code_only(text):
    """Returns the text with comments, strings, characters and preprocessor lines replaced by blanks. Positions do not change."""
    pattern = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|'
                         r'^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.S | re.M)
    return pattern.sub(lambda found: re.sub(r'[^\n]', ' ', found.group()), text)


def closing(code, start):
    """Returns the position after the bracket that closes the one at `start`, or None if it is not on this line."""
    depth = 0
    for i in range(start, len(code)):
        depth += {'(': 1, ')': -1}.get(code[i], 0)
        if depth == 0:
            return i + 1
    return None


def swap(table):
    def operator(draw, _text, code, _above):
        for found in SYMBOL.finditer(code):  # clang-format puts spaces only around binary symbols
            if found.group() in table and code[found.start() - 1:found.start()] in ('', ' ') and code[found.end():][:1] in ('', ' '):
                yield *found.span(), draw.choice(table[found.group()])
    return operator


def replace_words(table):
    def operator(_draw, _text, code, _above):
        for found in re.finditer(r'\b\w+\b', code):
            if found.group() in table:
                yield *found.span(), table[found.group()]
    return operator


def change_number(draw, digits, suffix):
    if re.fullmatch(r'0[xX][0-9a-fA-F]+|\d+', digits) and 'f' not in suffix.lower():
        value = int(digits, 0) if digits == '0' or digits[0] != '0' or digits[1:2] in 'xX' else int(digits, 8)
        value += draw.choice([-1, 1]) if value > 0 else 1
        return (hex(value) if digits[1:2] in ('x', 'X') else str(value)) + suffix
    return f'({digits + suffix} + 1)' if float(digits) == 0 else f'({digits + suffix} {draw.choice("*/")} 2)'


def constant(draw, _text, code, _above):
    for found in NUMBER.finditer(code):
        yield *found.span(), change_number(draw, *found.groups())


def conditions(code):
    for found in re.finditer(r'\b(?:if|while)\s*(\()', code):
        end = closing(code, found.start(1))
        if end:
            yield found.start(1), end


def negate(_draw, text, code, _above):
    for start, end in conditions(code):
        yield start, end, f'(!{text[start:end]})'


def fix_condition(draw, text, code, _above):
    for start, end in conditions(code):
        yield start, end, f'({text[start:end]} {draw.choice(["&& 0", "|| 1"])})'


def is_statement(code, above):
    """Returns whether a line is one complete statement, but no declaration, jump or release."""
    line = code.strip()
    previous = next((line for line in reversed(above) if line.strip()), '')
    return (code.startswith(' ') and re.match(r'[A-Za-z_*+(-].*;$', line) and line.count('(') == line.count(')') and line.count(';') == 1
            and not re.match(r'(return|goto|else|case|default|typedef|struct|enum|static|const|extern|free|close|fclose)\b', line)
            and not re.match(r'(const |unsigned |struct |enum )?\w+(\s+\**|\s*\*+)\w+(\[.*\])?\s*(=.*|,.*)?;$', line)
            and re.search(r'([;{}):]|\belse|\bdo)\s*$', previous))


def drop_statement(_draw, text, code, above):
    if is_statement(code, above) and not RELEASE.match(text.strip()):
        yield len(text) - len(text.lstrip()), len(text), ';'


def return_early(_draw, text, code, above):
    """Inserts `return STATUS_OK;` before a statement of a function that returns a status."""
    head = next((line for line in reversed(above) if re.match(r'[A-Za-z_].*\(|}', line)), '')
    if is_statement(code, above) and re.match(r'(static )?(inline )?enum status\b', head):
        begin = len(text) - len(text.lstrip())
        yield begin, begin, 'return STATUS_OK; '


def drop_call(_draw, _text, code, _above):
    for found in PROTECTING.finditer(code):
        end = closing(code, found.start(2))
        if end:
            yield found.start(), end, '0'


OPERATORS = {**{name: swap(table) for name, table in SWAPS.items()}, **{name: replace_words(table) for name, table in WORDS.items()},
             'constant': constant, 'negated condition': negate, 'fixed condition': fix_condition, 'statement dropped': drop_statement,
             'early success': return_early, 'system call dropped': drop_call}


def of_c(text, draw):
    """Yields (operator, index of the line, new line) for each place that an operator can change."""
    lines, code = text.split('\n'), code_only(text).split('\n')
    for i, line in enumerate(code):
        if line.strip() and 'static_assert' not in line.lower():
            for name, operator in OPERATORS.items():
                for start, end, new in operator(draw, lines[i], line, code[:i]):
                    yield name, i, lines[i][:start] + new + lines[i][end:]


# ---- Operators for Python ----

OPPOSITES = {ast.Lt: ast.LtE, ast.LtE: ast.Gt, ast.Gt: ast.GtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn,
             ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv,
             ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And}
STATEMENTS = (ast.Assign, ast.AugAssign, ast.Raise, ast.Delete)


def of_node(node, draw):
    """Yields (operator, text that replaces the node)."""
    new = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITES:
        new.ops[0] = OPPOSITES[type(node.ops[0])]()
        yield 'relation', f'({ast.unparse(new)})'
    elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in OPPOSITES:
        new.op = OPPOSITES[type(node.op)]()
        yield 'arithmetic' if isinstance(node, ast.BinOp) else 'and/or', f'({ast.unparse(new)})'
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield 'boolean', str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield 'constant', f'({node.value} {draw.choice("+-")} 1)'
    elif isinstance(node, STATEMENTS) or isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield 'statement dropped', 'pass'


def of_python(text, draw):
    lines, tree = text.split('\n'), ast.parse(text)
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}  # no usable positions
    for node in ast.walk(tree):
        if getattr(node, 'lineno', 0) != getattr(node, 'end_lineno', None) or id(node) in inside or not lines[node.lineno - 1].isascii():
            continue
        line, start, end = lines[node.lineno - 1], node.col_offset, node.end_col_offset
        for name, new in of_node(node, draw):
            yield name, node.lineno - 1, line[:start] + new + line[end:]
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.While, ast.IfExp)) and node.test.lineno == node.test.end_lineno and id(node) not in inside:
            line, start, end = lines[node.test.lineno - 1], node.test.col_offset, node.test.end_col_offset
            yield 'negated condition', node.test.lineno - 1, f'{line[:start]}(not ({line[start:end]})){line[end:]}'


# ---- Lists ----

def find_line(lines, fault):
    """Returns the index of the fault's line, or None if there is not exactly one. `lines` have no indentation."""
    found = [i for i, line in enumerate(lines) if line == fault.before and (not fault.above or i > 0 and lines[i - 1] == fault.above)]
    return found[0] if len(found) == 1 else None


def places(path, text, draw):
    """Yields (operator, path, line, new line, line above) for each place in a file. The line above is '' if the line occurs only
    once. Omits lines that occur several times after the same line."""
    lines = [line.strip() for line in text.split('\n')]
    counts, pairs = Counter(lines), Counter(zip(lines, lines[1:]))
    for operator, i, after in (of_python if path.endswith('.py') else of_c)(text, draw):
        above = '' if counts[lines[i]] == 1 else lines[i - 1]
        if after.strip() != lines[i] and (not above or pairs[above, lines[i]] == 1) and (counts[lines[i]] == 1 or above):
            yield operator, path, lines[i], after.strip(), above


def choose(tree, seed, rooms, spares):
    """Draws faults for each room, NAME:COUNT=PATTERN[,PATTERN]: COUNT faults and `spares` more, in the files whose paths match.
    To draw a fault, draws an operator, and then a place to which it applies. Rare operators therefore occur too. No line is
    drawn twice."""
    draw = random.Random(seed)
    for room in rooms:
        name, count, patterns = re.fullmatch(r'([^:=]+):(\d+)=(.+)', room).groups()
        names = sorted(os.path.relpath(os.path.join(folder, file), tree) for root in ('src', 'cpu', 'mpi', 'cuda', 'python/fdsl')
                       for folder, _, files in os.walk(os.path.join(tree, root)) for file in files)
        found, taken, drawn = {}, set(), 0
        for path in names:
            if path.endswith(('.c', '.h', '.cu', '.cuh', '.py')) and any(fnmatch.fnmatch(path, pattern) for pattern in patterns.split(',')):
                with open(os.path.join(tree, path), encoding='utf-8') as file:
                    for place in places(path, file.read(), draw):
                        found.setdefault(place[0], []).append(place)
        if not found:
            raise ValueError(f'no line of a file that matches {patterns} can be changed')
        while drawn < int(count) + spares and any(found.values()):
            operator = draw.choice(sorted(operator for operator in found if found[operator]))
            place = found[operator].pop(draw.randrange(len(found[operator])))
            if (place[1], place[2], place[4]) not in taken:
                taken.add((place[1], place[2], place[4]))
                yield Fault(name, drawn >= int(count), place[1], *[place[i] for i in (0, 2, 3, 4)])
                drawn += 1


def write_list(faults, command, out):
    print(f'# {command}\n# Columns: room (+: a spare), file, operator, line without the fault, line with it; if the line occurs several\n'
          '# times in the file, also the line above it.', file=out)
    for fault in faults:
        print('\t'.join([fault.room + '+' * fault.spare, *fault[2:-1]] + [fault.above] * bool(fault.above)), file=out)


def read_list(path):
    with open(path, encoding='utf-8') as file:
        rows = [row.rstrip('\n').split('\t') for row in file if row.strip() and not row.startswith('#')]
    return [Fault(row[0].rstrip('+'), row[0].endswith('+'), *row[1:5], *row[5:] or ['']) for row in rows]
