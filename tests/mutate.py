#!/usr/bin/env python3
"""Plants faults in copies of the tree, one at a time, and reports which of them the tests catch.

  tests/mutate.py --list --seed 7 jpeg:3=src/data/jpeg_image.* mpi:4=mpi/* > tests/mutations.txt    draw faults; commit the list
  tests/mutate.py --reach                                     find out which functions each suite executes
  tests/mutate.py --run tests/mutations.txt                   test the faults outside cuda/
  tests/mutate.py --run tests/mutations.txt --gpu             test the faults in cuda/, on a machine with a GPU
  tests/mutate.py --table tests/mutations.txt RESULTS ...     print the results as a table

A seed determines the faults. A room NAME:COUNT=PATTERN[,PATTERN] has COUNT faults in the files that match, and spares. The
next spare replaces a fault that cannot be tested: its line is gone, the build does not contain its file, it does not compile,
or the object code does not change.

--run tries first the suites that execute the function with the fault, then those that execute other functions of the file;
a suite that executes little else comes early. --reach finds this out once, with a build that counts calls (gcov). A fault is
caught by a suite that fails twice with the fault and passes without it. With --gpu, scripts of scripts/check run until their
first failed check, which must pass without the fault. --limit bounds the time that is spent on a fault.

Results are appended to WORK/results.tsv, or with --gpu to WORK/results-gpu.tsv. A repeated run continues after the faults
that have a result there. The sources in the working tree are never changed.
"""
import argparse
import contextlib
import glob
import json
import os
import queue
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from mutate_faults import choose, find_line, read_list, write_list

TREE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CCACHE = ['CC=ccache gcc'] if shutil.which('ccache') else []
CPU_OPTIONS, COUNTED_OPTIONS = [*CCACHE, 'CUDA=0', 'CFLAGS=-O2'], [*CCACHE, 'CUDA=0', 'CFLAGS=-O1 --coverage -fprofile-update=atomic -D_exit=exit', 'LDFLAGS=--coverage']
PYTHON = 'scripts/check/python.sh'
SUITE_LIMIT_S, REACH_LIMIT_S, BUILD_LIMIT_S = 120, 900, 900

# Checks for faults in files that match a pattern; the first matching pattern counts.
GPU_CHECKS = [('cuda/synth/', ['gpu.sh']), ('cuda/load/', ['load_gpu.sh']), ('cuda/ops/', ['ops_gpu.sh']),
              ('cuda/train/vit/', ['train_gpu.sh --engine vit', 'distributed_gpu.sh']),
              ('cuda/train/.*nccl|cuda/train/.*peer', ['distributed_gpu.sh', 'pipeline_gpu.sh']),
              ('cuda/train/', ['train_gpu.sh', 'train_gpu.sh --engine amp', 'train_gpu.sh --engine bf16', 'train_gpu.sh --engine tf32']),
              ('cuda/common/', ['load_gpu.sh', 'gpu.sh', 'train_gpu.sh'])]


# ---- Trees ----

def limit_resources():
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 30, 8 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


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
        if self.make('all', 'lib') is None:
            raise SystemExit(f'mutate.py: the build in {path} fails')

    def at(self, name):
        return os.path.join(self.path, name)

    def make(self, *targets):
        """Returns the output of make, or None if it fails."""
        try:
            made = subprocess.run(['make', '-j2' if not self.gpu else '-j', *self.options, *targets], cwd=self.path, env=self.environment, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=BUILD_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return None
        return made.stdout if made.returncode == 0 else None

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
        try:
            with open(path, encoding='utf-8') as file:
                lines = file.read().split('\n')
        except OSError:
            return 'the file is gone'
        at = find_line([line.strip() for line in lines], fault)
        if at is None:
            return 'the line is gone'
        objects = self.objects_of(fault.path)
        if not objects and not is_python:
            return 'not part of this build'
        for name in [fault.path, *objects]:
            with open(self.at(name), 'rb') as file:
                self.saved[name] = file.read(), os.stat(self.at(name)).st_mtime_ns
        self.line = at
        with open(self.marker, 'w', encoding='utf-8'):
            lines[at] = lines[at][:len(lines[at]) - len(lines[at].lstrip())] + fault.after
        with open(path, 'w', encoding='utf-8') as file:
            file.write('\n'.join(lines))
        if is_python:
            return ''
        if self.make('all', 'lib') is None:
            return 'does not compile'
        return '' if self.gpu or any(self.saved[name][0] != self.read(name) for name in objects) else 'same object code'

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
        if any(name.endswith('.o') for name in self.saved) and self.make('all', 'lib') is None:
            raise SystemExit(f'mutate.py: the build in {self.path} fails')
        self.saved = {}
        if os.path.exists(self.marker):
            os.unlink(self.marker)

    def programs_of(self, script):
        """Returns the test programs that a script of checks runs."""
        return sorted(set(re.findall(r'build/tests/gpu_\w+', self.read(script.split()[0]).decode()))) if self.gpu else []

    def run(self, suite, limit_s, **variables):
        """Runs a suite, or a script of checks until its first failed check. Returns '' or how it failed. Ends processes that
        outlive it."""
        programs = [suite] if '/tests/' in suite else self.programs_of(suite)
        if programs and self.make(*programs) is None:
            return 'does not compile'
        command = [self.at(suite), '--fail-fast'] if '/tests/' in suite else suite.split()
        with subprocess.Popen(command, cwd=self.path, env={**self.environment, **variables}, start_new_session=True, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE if self.gpu else subprocess.DEVNULL, stderr=subprocess.STDOUT, errors='replace',
                              preexec_fn=None if self.gpu else limit_resources) as process:
            timer = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
            timer.start()
            failed = next((line for line in process.stdout or () if line.startswith('FAILED')), '').strip()
            if not self.gpu:
                process.wait()
            ended = timer.is_alive()
            timer.cancel()
            try:
                if not failed and ended:
                    process.wait(10)
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass
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
    tree, written = Tree(os.path.join(arguments.work, 'counted'), COUNTED_OPTIONS, False), threading.Lock()
    if tree.make(*suites) is None:
        raise SystemExit('mutate.py: the suites do not compile')

    def count(suite):
        folder, begin = os.path.join(arguments.work, 'counts', os.path.basename(suite)), time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        failure = tree.run(suite, REACH_LIMIT_S, GCOV_PREFIX=folder)
        elapsed_s = time.monotonic() - begin
        functions = executed(tree, folder)
        shutil.rmtree(folder, ignore_errors=True)
        with written:
            known[suite] = {'s': elapsed_s, 'failure': failure, 'functions': functions}
            with open(path + '.new', 'w', encoding='utf-8') as file:
                json.dump(known, file)
            os.replace(path + '.new', path)
            print(f'{suite}: {elapsed_s:.0f} s, {sum(map(len, functions.values()))} functions {failure}', flush=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(count, suites))


def read_reach(work):
    try:
        with open(os.path.join(work, 'reach.json'), encoding='utf-8') as file:
            return json.load(file)
    except OSError:
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
    function = function_at(tree.read(fault.path).decode().split('\n'), tree.line)
    sources = {name[len('build/'):-2] for name in tree.saved if name.endswith('.o')}

    def score(suite):
        functions = known[suite]['functions']
        paths = [path for path in (fault.path, *sources) if path in functions][:1] or [fault.path]
        of_file = functions.get(paths[0], [])
        share = len(of_file) / sum(map(len, functions.values())) if of_file else 0
        return not share, function not in of_file, -share / (5 + known[suite]['s'])
    ordered = sorted((suite for suite in known if os.path.exists(os.path.join(TREE, 'tests', os.path.basename(suite) + '.c'))), key=score)
    ordered = [suite for suite in ordered if not score(suite)[0]]
    return [PYTHON, *ordered] if fault.path.startswith('src/lib/') else ordered


# ---- Running ----

class Results:
    """The file of results: the fault's columns, the result and the seconds that it took."""

    def __init__(self, path):
        self.path, self.known, self.lock = path, {}, threading.Lock()
        if os.path.exists(path):
            with open(path, encoding='utf-8') as file:
                for row in file:
                    *fault, result = row.rstrip('\n').split('\t')
                    self.known[tuple(fault)] = result

    @staticmethod
    def key(fault):
        return fault.room, fault.path, fault.operator, fault.before, fault.after, fault.above

    def get(self, fault):
        return self.known.get(self.key(fault))

    def add(self, fault, result):
        with self.lock, open(self.path, 'a', encoding='utf-8') as file:
            self.known[self.key(fault)] = result
            print('\t'.join([*self.key(fault), result]), file=file, flush=True)
            print(f'{fault.path}: {fault.operator}: {result}\n  {fault.before}\n  {fault.after}', flush=True)


def tested(result):
    return result.startswith(('caught', 'survived'))


class Run:
    def __init__(self, arguments):
        self.arguments, self.known, self.trees = arguments, read_reach(arguments.work), queue.Queue()
        self.sound = {suite: True for suite in self.known if not self.known[suite]['failure']}  # False: fails without a fault
        options = arguments.make.split() if arguments.make is not None else [] if arguments.gpu else CPU_OPTIONS
        for i in range(arguments.jobs):
            self.trees.put(Tree(os.path.join(arguments.work, f'tree-{i}'), options, arguments.gpu))

    def test(self, tree, fault):
        """Plants a fault and runs suites until one catches it. Returns the result."""
        begin, tried = time.monotonic(), 0
        try:
            reason = tree.plant(fault)
            for suite in [] if reason else order_of(tree, fault, self.known):
                left_s = self.arguments.limit - (time.monotonic() - begin)
                if left_s < 5 or self.sound.get(suite) is False:
                    continue
                known_s = self.known.get(suite, {}).get('s')
                limit_s = self.arguments.limit if tree.gpu or suite == PYTHON else max(60, 4 * known_s) if known_s else SUITE_LIMIT_S
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
                    if not check:
                        self.sound[suite] = sound
                    if not sound:
                        print(f'ignored, because it fails without a fault: {suite}{": " + check.group(1) if check else ""}', file=sys.stderr, flush=True)
                        tree.plant(fault)
                        continue
                return f'caught by {os.path.basename(suite)}: {failure} ({elapsed_s:.0f} s)'
            return reason or f'survived {tried} suites ({time.monotonic() - begin:.0f} s)'
        finally:
            tree.restore()

    def fill(self, room, results):
        """Tests the next faults of a room until one of them could be tested. `room` is an iterator over its faults."""
        for fault in room:
            if not results.get(fault):
                tree = self.trees.get()
                try:
                    results.add(fault, self.test(tree, fault))
                finally:
                    self.trees.put(tree)
            if tested(results.get(fault)):
                return


class Shared:
    """An iterator that several threads may use."""

    def __init__(self, items):
        self.items, self.lock = iter(items), threading.Lock()

    def __iter__(self):
        return self

    def __next__(self):
        with self.lock:
            return next(self.items)


def run(arguments):
    faults = [fault for fault in read_list(arguments.run) if fault.path.startswith('cuda/') == arguments.gpu and re.search(arguments.only, fault.room)]
    rooms = {room: Shared([fault for fault in faults if fault.room == room]) for room in {fault.room: 0 for fault in faults}}
    results = Results(os.path.join(arguments.work, f'results{"-gpu" * arguments.gpu}.tsv'))
    work = Run(arguments)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for done in [pool.submit(work.fill, rooms[fault.room], results) for fault in faults if not fault.spare]:
            done.result()


def cell(text):
    return '`' + text.replace('|', '\\|') + '`'


def table(path, results):
    """Prints a table of the results of all faults of a list that could be tested, and their number."""
    known, caught, survived = [Results(name) for name in results], 0, 0
    print('| room | file | operator | before | after | result |\n|---|---|---|---|---|---|')
    for fault in read_list(path):
        result = next((found for found in (one.get(fault) for one in known) if found), '')
        if tested(result):
            caught, survived = caught + result.startswith('caught'), survived + result.startswith('survived')
            print(f'| {fault.room} | `{fault.path}` | {fault.operator} | {cell(fault.before)} | {cell(fault.after)} | {result} |')
    print(f'\n{caught} of {caught + survived} caught ({100 * caught / max(caught + survived, 1):.0f} %), {survived} survived.')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument('--list', action='store_true', help='print a list of faults in the ROOMs')
    what.add_argument('--reach', action='store_true', help='find out which functions each suite executes')
    what.add_argument('--run', metavar='LIST', help='test the faults of a list')
    what.add_argument('--table', metavar='LIST', help='print the results in the files RESULTS as a table')
    parser.add_argument('names', nargs='*', metavar='ROOM|RESULTS')
    parser.add_argument('--seed', type=int, default=1, help='seed of the list (1)')
    parser.add_argument('--spares', type=int, default=3, help='spare faults per room (3)')
    parser.add_argument('--only', default='.', help='only rooms (--run) or suites (--reach) that match this regular expression')
    parser.add_argument('--gpu', action='store_true', help='test the faults in cuda/, not those outside it')
    parser.add_argument('--jobs', type=int, default=0, help='number of faults tested at a time (2; with --gpu 1)')
    parser.add_argument('--limit', type=float, default=600, help='time limit per fault in seconds (600)')
    parser.add_argument('--make', help=f'options of make ({" ".join(CPU_OPTIONS)}; with --gpu none)')
    parser.add_argument('--work', default=os.path.join(TREE, 'build/mutate'), help='folder for the copies and the results (build/mutate)')
    arguments = parser.parse_args()
    arguments.jobs, arguments.work = arguments.jobs or 2 - arguments.gpu, os.path.abspath(arguments.work)
    os.makedirs(arguments.work, exist_ok=True)
    try:
        if arguments.list:
            write_list(choose(TREE, arguments.seed, arguments.names, arguments.spares), ' '.join(['tests/mutate.py', *sys.argv[1:]]), sys.stdout)
        elif arguments.reach:
            reach(arguments)
        elif arguments.run:
            run(arguments)
        else:
            table(arguments.table, arguments.names)
    except (OSError, ValueError, AttributeError) as error:
        raise SystemExit(f'mutate.py: {error}') from error


if __name__ == '__main__':
    main()
