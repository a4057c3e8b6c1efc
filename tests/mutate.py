#!/usr/bin/env python3
"""Plants faults in copies of the tree, one at a time, and reports which of them the tests catch.

  tests/mutate.py --reach                                                    find out which functions each suite executes
  tests/mutate.py --seed 7 jpeg:3=src/data/jpeg_image.* mpi:4=mpi/*          draw and test faults outside cuda/
  tests/mutate.py --seed 7 --gpu load:2=cuda/load/*                          test faults in cuda/, on a machine with a GPU
  tests/mutate.py --seed 7 --list mpi:4=mpi/*                                only print the faults, and their spares
  tests/mutate.py --table build/mutate/results.tsv                           print results as a table

A seed and the tree determine the faults. A room NAME:COUNT=PATTERN[,PATTERN] has COUNT faults in the files that match. The
next fault of the room replaces a fault that cannot be tested: the build does not contain its file, it does not compile, or the
object code does not change.

The suites that execute the function with the fault run first, then those that execute other functions of the file; a suite
that executes little else comes early. --reach finds this out once, with a build that counts calls (gcov). A fault is caught by
a suite that fails twice with the fault and passes without it. With --gpu, scripts of scripts/check run until their first
failed check, which must pass without the fault. --limit bounds the time that is spent on a fault.

Results are appended to WORK/results.tsv, or with --gpu to WORK/results-gpu.tsv. A repeated run skips the faults that have a
result there. The sources in the working tree are never changed.
"""
import argparse
import contextlib
import fnmatch
import glob
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple

TREE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CCACHE = ['CC=ccache gcc'] if shutil.which('ccache') else []
CPU_OPTIONS, COUNTED_OPTIONS = [*CCACHE, 'CUDA=0', 'CFLAGS=-O2'], [*CCACHE, 'CUDA=0', 'CFLAGS=-O1 --coverage -fprofile-update=atomic -D_exit=exit', 'LDFLAGS=--coverage']
PYTHON = 'scripts/check/python.sh'
SUITE_LIMIT_S, REACH_LIMIT_S, BUILD_LIMIT_S = 120, 900, 900
TESTED = 'caught', 'survived'  # how the result of a fault that could be tested begins
DRAWN = 4  # faults drawn per fault of a room; those that cannot be tested are skipped

# Checks for faults in files that match a pattern; the first matching pattern counts.
GPU_CHECKS = [('cuda/synth/', ['gpu.sh']), ('cuda/load/', ['load_gpu.sh']), ('cuda/ops/', ['ops_gpu.sh']),
              ('cuda/train/vit/', ['train_gpu.sh --engine vit', 'distributed_gpu.sh']),
              ('cuda/train/.*nccl|cuda/train/.*peer', ['distributed_gpu.sh', 'pipeline_gpu.sh']),
              ('cuda/train/', ['train_gpu.sh', 'train_gpu.sh --engine amp', 'train_gpu.sh --engine bf16', 'train_gpu.sh --engine tf32']),
              ('cuda/common/', ['load_gpu.sh', 'gpu.sh', 'train_gpu.sh'])]


# ---- Faults ----

# A fault: in the file `path`, line number `at` (from 0), `before`, becomes `after`. Both have no indentation.
Fault = namedtuple('Fault', 'room path operator before after at')

SWAPS = {'relation': {'<': ['<=', '>='], '<=': ['<', '>'], '>': ['>=', '<='], '>=': ['>', '<'], '==': ['!='], '!=': ['==']},
         'arithmetic': {'+': ['-'], '-': ['+'], '*': ['/'], '/': ['*'], '%': ['*'], '+=': ['-='], '-=': ['+='], '*=': ['/='], '/=': ['*=']},
         'bits': {'<<': ['>>'], '>>': ['<<'], '&': ['|'], '|': ['&'], '^': ['&'], '|=': ['&='], '&=': ['|='], '<<=': ['>>='], '>>=': ['<<=']},
         'and/or': {'&&': ['||'], '||': ['&&'], 'and': ['or'], 'or': ['and']},
         'boolean': {'true': ['false'], 'false': ['true'], 'True': ['False'], 'False': ['True']},
         'min/max': {one: [other] for low, high in (('fmin', 'fmax'), ('fminf', 'fmaxf'), ('min', 'max'), ('MIN', 'MAX'), ('atomicMin', 'atomicMax'))
                     for one, other in ((low, high), (high, low))}}
TOKEN = re.compile(r'\b[A-Za-z_]\w*\b|<<=|>>=|<<<|>>>|->|\+\+|--|&&|\|\||\*\*|//|<=|>=|==|!=|<<|>>|[-+*/%&|^]=|[-+*/%&|^<>]')
NUMBER = re.compile(r'(?<![\w.])(0[xX][0-9a-fA-F]+|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+)([uUlLfF]*)(?![\w.])')
PROTECTING = re.compile(r'(?<=\s)(?:fsync|fdatasync|fflush|flock|ftruncate|rename|msync|fcntl)(?=\()')  # they return 0 on success
# Dropping a call that releases memory or a handle changes no result; `make check SAN=1` detects leaks.
RELEASE = re.compile(r'(\(void\)\s*)?\w*(free|close|destroy|munmap)\w*\(', re.I)
NO_CODE = {False: r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*',
           True: r'"""(?:\\.|.)*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*'}


def closing(code, start):
    """Returns the position after the bracket that closes the one at `start`, or None if it is not on this line."""
    depth = 0
    for i in range(start, len(code)):
        depth += {'(': 1, ')': -1}.get(code[i], 0)
        if depth == 0:
            return i + 1
    return None


def change_number(draw, digits, suffix):
    if re.fullmatch(r'0[xX][0-9a-fA-F]+|0|[1-9]\d*', digits) and 'f' not in suffix.lower():
        value = int(digits, 0)
        value += draw.choice([-1, 1]) if value > 0 else 1
        return (hex(value) if digits[1:2] in ('x', 'X') else str(value)) + suffix
    return f'({digits + suffix} + 1)' if float(digits) == 0 else f'({digits + suffix} {draw.choice("*/")} 2)'


def is_statement(code, above, python):
    """Returns whether a line is one complete statement, but no declaration, jump or release."""
    line = code.strip()
    if not code.startswith(' ') or not re.match(r'[A-Za-z_*+(-]', line) or line.count('(') != line.count(')') or RELEASE.match(line):
        return False
    if python:
        return re.match(r'raise\b|del\b|[\w.\[\]]+ [-+*/|&]?= |[\w.]+\(', line) and above.rstrip()[-1:] not in '([{,\\'
    return (re.fullmatch(r'[^;]*;', line) and not re.match(r'(return|goto|else|case|default|typedef|struct|enum|static|const|extern)\b', line)
            and not re.match(r'(const |unsigned |struct |enum )?\w+(\s+\**|\s*\*+)\w+(\[.*\])?\s*(=.*|,.*)?;$', line)
            and re.search(r'([;{}):]|\belse|\bdo)\s*$', above))


def changes(draw, text, code, above, head, python):
    """Yields (operator, start, end, new text) for each place of a line that can be changed. `code` is the line without comments
    and strings, `above` the line above it, `head` the first line of its function."""
    for found in TOKEN.finditer(code):  # both languages put spaces only around binary symbols
        alone = found.group()[0].isalpha() or (code[found.start() - 1:found.start()] in ('', ' ') and code[found.end():][:1] in ('', ' '))
        for name in (name for name, table in SWAPS.items() if alone and found.group() in table):
            yield name, *found.span(), draw.choice(SWAPS[name][found.group()])
    for found in NUMBER.finditer(code):
        yield 'constant', *found.span(), change_number(draw, *found.groups())
    for found in re.finditer(r'\b(?:if|while) ([^:]+)(?=:$)' if python else r'\b(?:if|while)\s*(\()', code):
        start, end = found.span(1)[0], found.end() if python else closing(code, found.start(1))
        if end:
            yield 'negated condition', start, end, f'not ({text[start:end]})' if python else f'(!{text[start:end]})'
            yield 'fixed condition', start, end, f'({text[start:end]} {draw.choice(["and 0", "or 1"] if python else ["&& 0", "|| 1"])})'
    for found in PROTECTING.finditer(code):
        if closing(code, found.end()):
            yield 'system call dropped', found.start(), closing(code, found.end()), '0'
    if is_statement(code, above, python):
        begin = len(text) - len(text.lstrip())
        yield 'statement dropped', begin, len(text), 'pass' if python else ';'
        if re.match(r'(static )?(inline )?enum status\b', head):
            yield 'early success', begin, begin, 'return STATUS_OK; '


def places(text, draw, python):
    """Yields (operator, index of the line, new line) for each place of a file that can be changed."""
    code = re.sub(NO_CODE[python], lambda found: re.sub(r'[^\n]', ' ', found.group()), text, flags=re.S | re.M).split('\n')
    above = head = ''
    for i, (line, bare) in enumerate(zip(text.split('\n'), code)):
        if bare.strip() and 'static_assert' not in bare.lower():
            for name, start, end, new in changes(draw, line, bare, above, head, python):
                yield name, i, line[:start] + new + line[end:]
        above = bare if bare.strip() else above
        head = bare if re.match(r'[A-Za-z_].*\(|}', bare) else head


def choose(draw, room, gpu):
    """Returns the number of faults of a room, NAME:COUNT=PATTERN[,PATTERN], and a list of DRAWN times as many faults in the files
    whose paths match, in cuda/ (`gpu`) or outside it. To draw a fault, draws an operator, and then a place to which it applies:
    rare operators occur too. No line is drawn twice."""
    name, count, patterns = re.fullmatch(r'([^:=]+):(\d+)=(.+)', room).groups()
    found, drawn = {}, {}
    for path in sorted(os.path.relpath(path, TREE) for root in ('src', 'cpu', 'mpi', 'cuda', 'python/fdsl') for path in
                       glob.glob(os.path.join(TREE, root, '**/*'), recursive=True)):
        if (path.endswith(('.c', '.h', '.cu', '.cuh', '.py')) and path.startswith('cuda/') == gpu
                and any(fnmatch.fnmatch(path, pattern) for pattern in patterns.split(','))):
            with open(os.path.join(TREE, path), encoding='utf-8') as file:
                text = file.read()
            lines = [line.strip() for line in text.split('\n')]
            for operator, at, after in places(text, draw, path.endswith('.py')):
                if after.strip() != lines[at]:
                    found.setdefault(operator, []).append(Fault(name, path, operator, lines[at], after.strip(), at))
    if not found:
        raise ValueError(f'no line of a file that matches {patterns} can be changed')
    while any(found.values()) and len(drawn) < DRAWN * int(count):
        operator = draw.choice(sorted(operator for operator in found if found[operator]))
        fault = found[operator].pop(draw.randrange(len(found[operator])))
        drawn.setdefault((fault.path, fault.at), fault)
    return int(count), list(drawn.values())


# ---- Trees ----

class Tree:
    """A copy of the working tree with its own build. plant() builds the program with a fault, restore() without it."""

    def __init__(self, path, options, gpu):
        self.path, self.options, self.gpu = path, options, gpu
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(('MAKE', 'MFLAGS'))}
        self.environment.update(CCACHE_BASEDIR=path, CCACHE_NOHASHDIR='1', FDSL_BENCH=self.at('fdsl-bench'), PYTEST_ADDOPTS='-x',
                                OMP_WAIT_POLICY='passive', OMPI_MCA_odls_base_sigkill_timeout='0')
        self.marker, self.saved = self.at('planted'), {}
        os.makedirs(path, exist_ok=True)
        if gpu and os.path.isdir(os.path.join(TREE, 'build')) and not os.path.isdir(self.at('build')):  # compiling would take minutes
            shutil.copytree(os.path.join(TREE, 'build'), self.at('build'), symlinks=True, ignore=shutil.ignore_patterns('mutate'))
        for name in os.listdir(path):  # keeps the build of an earlier run, unless this run ended while a fault was planted
            if os.path.exists(self.marker) or name not in ('build', 'fdsl-bench'):
                (shutil.rmtree if os.path.isdir(self.at(name)) else os.unlink)(self.at(name))
        shutil.copytree(TREE, path, dirs_exist_ok=True, symlinks=True, ignore=lambda folder, names: {
            name for name in names if name == '__pycache__' or folder == TREE and name in ('.git', 'build', 'data', 'dist', 'fdsl-bench')})
        if not self.make('all', 'lib'):
            raise SystemExit(f'mutate.py: the build in {path} fails')

    def at(self, name):
        return os.path.join(self.path, name)

    def make(self, *targets):
        """Returns whether make succeeds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return subprocess.run(['make', '-j' if self.gpu else '-j2', *self.options, *targets], cwd=self.path, env=self.environment,
                                  capture_output=True, timeout=BUILD_LIMIT_S, check=False).returncode == 0
        return False

    def objects_of(self, path):
        """Returns the objects that depend on a file."""
        found = []
        for listing in glob.glob(self.at('build/**/*.d'), recursive=True):
            with open(listing, encoding='utf-8') as file:
                target, _, sources = file.read().partition(':')
            if target.strip().endswith('.o') and path in re.split(r'[\s:\\]+', sources):
                found.append(target.strip())  # nvcc writes a blank before the colon
        return found

    def plant(self, fault):
        """Returns '' or the reason why the fault cannot be tested."""
        path, is_python = self.at(fault.path), fault.path.endswith('.py')
        objects = self.objects_of(fault.path)
        if not objects and not is_python:
            return 'not part of this build'
        self.saved = {name: (self.read(name), os.stat(self.at(name)).st_mtime_ns) for name in [fault.path, *objects]}
        lines = self.saved[fault.path][0].decode().split('\n')
        lines[fault.at] = lines[fault.at][:len(lines[fault.at]) - len(lines[fault.at].lstrip())] + fault.after
        with open(self.marker, 'w', encoding='utf-8'), open(path, 'w', encoding='utf-8') as file:
            file.write('\n'.join(lines))
        if not is_python and not self.make('all', 'lib'):
            return 'does not compile'
        return '' if self.gpu or is_python or any(self.saved[name][0] != self.read(name) for name in objects) else 'same object code'

    def read(self, name):
        with open(self.at(name), 'rb') as file:
            return file.read()

    def restore(self):
        """Restores the source and its objects. The objects are new for make, so that it links everything again."""
        for name in set(self.objects_of(next(iter(self.saved)))) - set(self.saved) if self.saved else ():
            os.unlink(self.at(name))  # compiled for the first time, with the fault
        for name, (content, mtime_ns) in self.saved.items():
            with open(self.at(name), 'wb') as file:
                file.write(content)
            if not name.endswith('.o'):
                os.utime(self.at(name), ns=(mtime_ns, mtime_ns))
        if any(name.endswith('.o') for name in self.saved) and not self.make('all', 'lib'):
            raise SystemExit(f'mutate.py: the build in {self.path} fails')
        self.saved = {}
        if os.path.exists(self.marker):
            os.unlink(self.marker)

    def run(self, suite, limit_s, **variables):
        """Runs a suite, or a script of checks until its first failed check. Returns '' or how it failed. Ends processes that
        outlive it."""
        programs = [suite] if '/tests/' in suite else set(re.findall(r'build/tests/gpu_\w+', self.read(suite.split()[0]).decode()) if self.gpu else ())
        if programs and not self.make(*programs):
            return 'does not compile'
        command = [self.at(suite), '--fail-fast'] if '/tests/' in suite else suite.split()
        if not self.gpu:
            command = ['prlimit', '--core=0', f'--fsize={8 << 30}', f'--as={os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}', *command]
        with subprocess.Popen(command, cwd=self.path, env={**self.environment, **variables}, start_new_session=True, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE if self.gpu else subprocess.DEVNULL, stderr=subprocess.STDOUT, errors='replace') as process:
            timer = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
            timer.start()
            failed = next((line for line in process.stdout or () if line.startswith('FAILED')), '').strip()
            if not self.gpu:
                process.wait()
            ended = timer.is_alive()
            timer.cancel()
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                if not failed and ended:
                    process.wait(10)
                os.killpg(process.pid, signal.SIGKILL)
        for link in glob.glob('/proc/[0-9]*/exe'):  # processes that tests start are in other sessions
            with contextlib.suppress(OSError):
                if os.readlink(link) == self.at(suite):
                    os.kill(int(link.split('/')[2]), signal.SIGKILL)
        return failed or (f'no end within {limit_s:.0f} s' if not ended else f'exit {process.returncode}' if process.returncode else '')


# ---- Which suites execute a function ----

def suites_of(gpu, path):
    if gpu:
        return [f'scripts/check/{check}' for check in next((checks for pattern, checks in GPU_CHECKS if re.match(pattern, path)), [])]
    return sorted(f'build/tests/{os.path.basename(name)[:-2]}' for name in glob.glob(os.path.join(TREE, 'tests/test_*.c')))


def executed(tree, folder):
    """Returns {path: functions} of the functions that the processes of a suite executed; `folder` has their counts."""
    counts, functions = [], {}
    for place, _, names in os.walk(folder):
        for name in (name for name in names if name.endswith('.gcda')):
            notes = os.path.join('/', os.path.relpath(place, folder), name[:-5] + '.gcno')
            if os.path.exists(notes) and '/build/tests/' not in notes:
                os.symlink(notes, os.path.join(place, name[:-5] + '.gcno'))
                counts.append(os.path.join(place, name))
    told = subprocess.run(['gcov', '--json-format', '--stdout', *counts], cwd=tree.path, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          check=False).stdout if counts else ''
    for document in map(json.loads, told.splitlines()):
        for file in document['files']:
            path = os.path.relpath(os.path.join(tree.path, file['file']), tree.path)
            names = {function['name'] for function in file['functions'] if function['execution_count']}
            if names and not path.startswith(('..', 'tests')):
                functions.setdefault(path, set()).update(names)
    return {path: sorted(names) for path, names in functions.items()}


def reach(arguments):
    """Writes WORK/reach.json: for each suite, its time in seconds and the functions that it executes."""
    path, known = os.path.join(arguments.work, 'reach.json'), read_reach(arguments.work)
    suites = [suite for suite in suites_of(False, '') if suite not in known and re.search(arguments.only, suite)]
    tree, folder = Tree(os.path.join(arguments.work, 'counted'), COUNTED_OPTIONS, False), os.path.join(arguments.work, 'counts')
    if not tree.make(*suites):
        raise SystemExit('mutate.py: the suites do not compile')
    for suite in suites:
        begin = time.monotonic()
        failure = tree.run(suite, REACH_LIMIT_S, GCOV_PREFIX=folder)
        known[suite] = {'s': time.monotonic() - begin, 'failure': failure, 'functions': executed(tree, folder)}
        shutil.rmtree(folder, ignore_errors=True)
        with open(path + '.new', 'w', encoding='utf-8') as file:
            json.dump(known, file)
        os.replace(path + '.new', path)
        print(f'{suite}: {known[suite]["s"]:.0f} s, {sum(map(len, known[suite]["functions"].values()))} functions {failure}', flush=True)


def read_reach(work):
    with contextlib.suppress(OSError), open(os.path.join(work, 'reach.json'), encoding='utf-8') as file:
        return json.load(file)
    return {}


def function_at(lines, at):
    """Returns the name of the function that contains a line, or '' outside of functions."""
    for i in range(at, -1, -1):
        found = re.match(r'[A-Za-z_].*?(\w+)\((?!.*;$)', lines[i])
        if found or lines[i].startswith(('}', '};')) and i < at:
            return found.group(1) if found else ''
    return ''


def order_of(tree, fault, known):
    """Returns the suites to run, in order."""
    if tree.gpu:
        return suites_of(True, fault.path)
    if fault.path.endswith('.py'):
        return [PYTHON]
    function = function_at(tree.read(fault.path).decode().split('\n'), fault.at)

    def score(suite):
        functions = known[suite]['functions']
        of_file = functions.get(fault.path, ())
        return function not in of_file, -len(of_file) / sum(map(len, functions.values())) / (5 + known[suite]['s'])
    ordered = sorted((suite for suite in suites_of(False, '') if suite in known and fault.path in known[suite]['functions']), key=score)
    return [PYTHON, *ordered] if fault.path.startswith('src/lib/') else ordered


# ---- Running ----

def read_results(path):
    """Returns the results in a file: {(room, file, operator, line without the fault, with it): result}."""
    with contextlib.suppress(FileNotFoundError), open(path, encoding='utf-8') as file:
        return {tuple(fault): result for *fault, result in (row.rstrip('\n').split('\t') for row in file)}
    return {}


class Run:
    def __init__(self, arguments):
        self.limit_s, self.known = arguments.limit, read_reach(arguments.work)
        self.sound = {suite: True for suite in self.known if not self.known[suite]['failure']}  # False: fails without a fault
        options = arguments.make.split() if arguments.make is not None else [] if arguments.gpu else CPU_OPTIONS
        self.tree = Tree(os.path.join(arguments.work, 'tree'), options, arguments.gpu)

    def test(self, fault):
        """Plants a fault and runs suites until one catches it. Returns the result."""
        tree, begin, tried = self.tree, time.monotonic(), 0
        try:
            reason = tree.plant(fault)
            for suite in [] if reason else order_of(tree, fault, self.known):
                left_s = self.limit_s - (time.monotonic() - begin)
                if left_s < 5 or self.sound.get(suite) is False:
                    continue
                known_s = self.known.get(suite, {}).get('s')
                limit_s = self.limit_s if tree.gpu or suite == PYTHON else max(60, 4 * known_s) if known_s else SUITE_LIMIT_S
                failure = tree.run(suite, limit_s)
                if failure and not failure.startswith(('no end', 'FAILED')):
                    failure = tree.run(suite, limit_s)
                if not failure or tree.gpu and failure.startswith('no end'):  # a check that hangs fails after a limit of its own
                    tried += 1
                    continue
                elapsed_s = time.monotonic() - begin
                check = re.match(r'FAILED +\d+ s  (.*)', failure)
                if check or suite not in self.sound:
                    tree.restore()
                    only = {'ONLY': '^' + re.sub(r'([][\\.^$*+?(){}|])', r'\\\1', check.group(1)) + '$'} if check else {}
                    sound = not tree.run(suite, limit_s, **only) or not tree.run(suite, limit_s, **only)
                    self.sound[suite + check.group(1) if check else suite] = sound
                    if not sound:
                        print(f'ignored, because it fails without a fault: {suite} {failure}', file=sys.stderr, flush=True)
                        tree.plant(fault)
                        continue
                return f'caught by {os.path.basename(suite)}: {failure} ({elapsed_s:.0f} s)'
            return reason or f'survived {tried} suites ({time.monotonic() - begin:.0f} s)'
        finally:
            tree.restore()


def run(arguments, rooms):
    """Tests faults of each room, until as many as the room has could be tested."""
    path = os.path.join(arguments.work, f'results{"-gpu" * arguments.gpu}.tsv')
    work, known = Run(arguments), read_results(path)
    if not arguments.gpu and not work.known:
        raise ValueError('run --reach first')
    for count, faults in rooms:
        for fault in faults:
            if count > 0 and fault[:-1] not in known:
                known[fault[:-1]] = result = work.test(fault)
                with open(path, 'a', encoding='utf-8') as file:
                    print('\t'.join([*fault[:-1], result]), file=file)
                print(f'{fault.path}: {fault.operator}: {result}\n  {fault.before}\n  {fault.after}', flush=True)
            count -= known.get(fault[:-1], '').startswith(TESTED)


def table(paths):
    """Prints the results of all faults that could be tested, and their number."""
    faults = [(*fault, result) for path in paths for fault, result in read_results(path).items() if result.startswith(TESTED)]
    caught = sum(fault[-1].startswith('caught') for fault in faults)
    print('| room | file | operator | before | after | result |\n|---|---|---|---|---|---|')
    for room, path, operator, before, after, result in faults:
        before, after = before.replace('|', '\\|'), after.replace('|', '\\|')
        print(f'| {room} | `{path}` | {operator} | `{before}` | `{after}` | {result} |')
    print(f'\n{caught} of {len(faults)} caught ({100 * caught / max(len(faults), 1):.0f} %), {len(faults) - caught} survived.')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', nargs='*', metavar='ROOM|RESULTS')
    what = parser.add_mutually_exclusive_group()
    what.add_argument('--list', action='store_true', help='only print the faults of the ROOMs')
    what.add_argument('--reach', action='store_true', help='find out which functions each suite executes')
    what.add_argument('--table', action='store_true', help='print the results in the files RESULTS as a table')
    parser.add_argument('--seed', type=int, default=1, help='seed of the faults (1)')
    parser.add_argument('--only', default='.', help='with --reach, only suites that match this regular expression')
    parser.add_argument('--gpu', action='store_true', help='test the faults in cuda/, not those outside it')
    parser.add_argument('--limit', type=float, default=600, help='time limit per fault in seconds (600)')
    parser.add_argument('--make', help=f'options of make ({" ".join(CPU_OPTIONS)}; with --gpu none)')
    parser.add_argument('--work', default=os.path.join(TREE, 'build/mutate'), help='folder for the copies and the results (build/mutate)')
    arguments = parser.parse_args()
    arguments.work = os.path.abspath(arguments.work)
    os.makedirs(arguments.work, exist_ok=True)
    try:
        draw = random.Random(arguments.seed)
        if arguments.reach:
            reach(arguments)
        elif arguments.table:
            table(arguments.names)
        else:
            rooms = [choose(draw, room, arguments.gpu) for room in arguments.names or parser.error('name a room')]
            if arguments.list:
                print('\n'.join('\t'.join(fault[:-1]) for _, faults in rooms for fault in faults))
            else:
                run(arguments, rooms)
    except (OSError, ValueError, AttributeError) as error:
        raise SystemExit(f'mutate.py: {error}') from error


if __name__ == '__main__':
    main()
