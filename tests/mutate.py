#!/usr/bin/env python3
"""Plants faults in copies of the tree, one at a time, and reports which of them the tests catch.

  tests/mutate.py --list --seed 7 --count 60 > tests/mutations.txt     choose the faults; commit the list before --run
  tests/mutate.py --run tests/mutations.txt --table docs/notes/mutations.md
  tests/mutate.py --run tests/mutations.txt --table docs/notes/mutations.md --gpu      on a machine with a GPU
  tests/mutate.py --check tests/mutations.txt                          only check that the list fits the sources

A seed determines the faults. They are distributed evenly over the folders with sources. Operators create the faults, for
example by changing a relation or dropping a statement. Without --gpu, the Criterion suites run for faults outside cuda/:
first the suites that call functions of the changed file, then those of its folder. With --gpu, the checks of gpu_checks()
run for faults in cuda/. A fault is caught by the first suite that fails twice, or that exceeds its time limit. The next
spare of its folder replaces a fault that cannot be tested: the build does not contain its file, the fault does not compile,
or (without --gpu) the object code does not change. The sources in the working tree are never changed.

Calls that release memory or a handle (free, fclose, munmap, cudaFree, ...) are not dropped: no result depends on them, and
make check SAN=1 detects leaks on the host.
--notes names a file of lines "PATH:LINE <tab> reason" for survivors that no test can catch; the table shows the reasons.
"""
import argparse
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
from concurrent.futures import ThreadPoolExecutor, as_completed

import mutate_faults
from mutate_build import Build, CompileError, copy_tree, LEFT_OUT, PROGRAM

TREE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
QUICK = '--min-samples 1 --min-time 0 --max-time 0 --warmups 0 --warmup-time 0'
CPU_OPTIONS = ['CUDA=0', 'CFLAGS=-O2'] + (['CC=ccache gcc'] if shutil.which('ccache') else [])

# Pairs of regular expressions: one for folders with sources ("rooms" in this script), and one for the suites that test them.
# The first pair whose expression matches a folder is used for this folder.
ROOM_SUITES = [('train', 'train|memory|source|live|compute|cli_runs|mpi'), ('load', 'load|memory|source|prepare|tar|formats|cli|mpi|consumed|fuzz'),
               ('synth', 'cli|memory|source|mpi|oracle|noise|class|picture|output|line|philox|variant|live'),
               ('mpi', 'mpi|comm|ranks|cli|lock'), ('.', '.')]

# Data sets that the checks of load read. A key is NAME-STORE, where STORE is the value of --store; a value has the other
# options of --prepare. The program without faults generates each set once.
GPU_SETS = {'odd-shards': '--shards 5 --samples 257 --sample-shape 3,31,33 --dtype u8',
            'odd-files': '--samples 257 --sample-shape 3,31,33 --dtype u8',
            'half-shards': '--shards 1 --samples 101 --sample-shape 1,1001 --dtype f16',
            'float-shards': '--shards 7 --samples 97 --sample-shape 129 --dtype f32',
            'large-shards': '--shards 2 --samples 5 --sample-shape 3,1024,1025 --dtype u8',
            'middle-shards': '--shards 3 --samples 500 --sample-shape 65408 --dtype u8',
            'taught-shards': '--shards 4 --from synth --classes 4 --res 28 --samples 1024 --encode npy'}


# ---- Suites and checks ----

def gpu_checks():
    """Returns {prefix of paths in cuda/: commands}. Commands that are likely to catch a fault come first. command()
    replaces $bench, $tests, $data and $own by paths."""
    ladder = '$bench --variant gbase,mem-float2,mem,rng,rng-reuse,rng-uniform4,rng-xorwow-reuse,bat,bat-reuse --verify ' + QUICK
    fused = '$bench --variant fused,fused-graph --verify ' + QUICK
    synth = [f'{fused} --vertices 257 --orbits 33 --res 225 --batch 33', f'{ladder} --vertices 257 --orbits 33 --res 225 --batch 9',
             f'{fused} --vertices 1000 --orbits 200 --res 512 --batch 7', f'{ladder} --vertices 1000 --orbits 200 --res 512 --batch 3',
             f'{fused} --vertices 1500 --orbits 200 --res 225 --batch 3 --formula visualatom', f'{fused} --vertices 3 --orbits 1500 --res 224 --batch 16',
             f'{fused} --classes 37 --batch 40 --res 512 --formula visualatom --instance 1000003 --seed 18446744073709551615',
             f'{fused} --vertices 31 --orbits 4 --res 97 --batch 64', f'{fused} --vertices 62 --orbits 7 --res 512 --noise 0 --batch 5',
             f'{fused} --vertices 1000 --orbits 30 --res 512 --noise 300 --line-width 3 --batch 5', f'{fused} --vertices 300 --orbits 77 --res 16384 --batch 1',
             f'{fused} --batch 9 --dtype f16 --channels 3', f'{fused} --batch 9 --dtype f32 --out-res 224',
             f'{fused} --batch 1 --res 8192 --out-res 4096 --vertices 4096 --orbits 2000 --line-width 2',
             f'{fused} --batch 9 --dtype u8 --channels 3 --layout nhwc --res 137', f'{fused} --batch 9 --dtype f16 --out-res 223 --fit crop --classes 17',
             f'{fused} --batch 9 --dtype bf16 --res 1000 --out-res 7 --channels 3', f'{ladder} --classes 37 --batch 40 --res 300 --formula visualatom',
             f'{ladder} --vertices 1 --orbits 5 --res 3 --batch 2', '$tests/gpu_exact', f'{fused} --batch 9 --res 96 --compute 5', '$tests/gpu_live']
    load = []
    twice = '--cache any --loops 2 --warmups 0 --warmup-time 0 --verify'
    for data, options in (('odd', '--batch 31 --dtype f16 --threads 3'), ('large', '--batch 2 --dtype raw --threads 2 --epochs 2'),
                          ('float', '--batch 1 --dtype f32 --threads 1 --mean -3 --std 7'), ('half', '--batch 7 --dtype f32 --threads 2'),
                          ('middle', '--batch 1000 --dtype bf16 --threads 16 --epochs 3 --seed 9'), ('odd', '--batch 32 --dtype bf16 --shuffle 7'),
                          ('taught', '--batch 64 --dtype f16 --compute train'), ('odd', '--batch 31 --dtype f16 --compute 5')):
        load += [f'$bench --variant {name} --data $data/{data}-shards {twice} {options}' for name in ('shards-gpu', 'gpu-resident')]
    load += [f'$bench --variant {name} --data $data/odd-files {twice} --batch 31 --dtype f32' for name in ('files-gpu', 'gpu-resident')]
    load += [f'$bench --variant shards-gpu --data $data/{data}-shards {twice} --chunk 4 --ring 2 --threads 2 --batch 8' for data in ('odd', 'large')]
    load += [f'$bench --variant gds --data $data/{data}-shards {twice} --batch 31 --threads 2' for data in ('odd', 'large', 'float')]
    load += ['rm -rf $own && cp -r $data/odd-shards $own && truncate -s 5000 $own/*-000002.tar && '
             '! timeout 60 $bench --variant shards-gpu --data $own --cache any --loops 2 --warmups 0 --warmup-time 0']
    train = [f'$tests/gpu_train --engine {engine} --short {net}' for net in ('conv', 'pool', 'relu', 'dropout', 'mean', 'add_pool', 'cnn3d', 'conv_deep', 'pool_deep', 'add')
             for engine in ('cuda', 'bf16')]
    digits = '--data digits --batch 65 --train-size 200 --test-size 65 --epochs 1'
    train += ['$tests/gpu_graph --short 1 2 3', '$tests/gpu_tensor --short', '$tests/gpu_batch', f'$bench --variant train-graph --verify --model cnn {digits}',
              f'$bench --variant train-cuda,train-tf32,train-bf16,train-amp --verify --model lenet {digits} --shift 2 --flip',
              f'$bench --variant train-cudnn --verify --model cnn {digits}', '$tests/gpu_train lenet cnn cnn-fdsl linear add_rows', '$tests/gpu_train --engine amp cnn3d lenet',
              '$tests/gpu_train --engine tf32 cnn conv', '$tests/gpu_live', '$tests/gpu_graph $(seq $($tests/gpu_graph --count))',
              f'$bench --variant train-graph --model cnn {digits} --checkpoint $own.graph && $bench --variant infer-graph,infer-cuda --verify --data digits '
              f'--test-size 300 --checkpoint $own.graph --batch 257 {QUICK}']
    steps = ['scripts/check/learning.py 0 $bench --variant shards-gpu --data $data/middle-shards --cache any --batch 32 --loops 20 --compute 1',
             f'scripts/check/learning.py 0 $bench --variant fused --batch 64 --res 64 --compute train:logreg --classes 4 --dtype f16 --min-samples 20']
    common = ['$tests/gpu_batch', '$tests/gpu_batch --product', *steps, synth[0], synth[1], load[0], load[-2],
              *(check for check in load if '--compute' in check), *(check for check in synth if '--compute' in check),
              f'{fused} --classes 4 --batch 64 --res 64 --dtype f16 --compute train', train[0]]
    return {'cuda/synth/': synth, 'cuda/load/': load, 'cuda/train/': train, 'cuda/common/': common}


def defined_in(path):
    """Returns the names of functions that a source or its header defines or declares at the beginning of a line."""
    names = set()
    for end in ('.c', '.h'):
        try:
            with open(os.path.join(TREE, os.path.splitext(path)[0] + end), encoding='utf-8') as file:
                names |= set(re.findall(r'^[a-z][\w *]*?\b(\w+)\(', file.read(), re.M))
        except OSError:
            pass
    return names - {'main', 'defined'}


def suites_for(path, suites, times, every):
    """Returns the suites to run for a file, in groups: suites that call its functions or have its name, then suites of its
    folder (ROOM_SUITES), and with `every` all other suites. In each group, the fastest suite comes first."""
    names, stem = defined_in(path), os.path.splitext(os.path.basename(path))[0]
    pattern = next(suites for room, suites in ROOM_SUITES if re.search(room, os.path.dirname(path)))

    def rank(suite):
        name = os.path.basename(suite)
        with open(os.path.join(TREE, f'tests/{name}.c'), encoding='utf-8') as file:
            words = set(re.findall(r'\w+', file.read()))
        return (0 if words & names or stem in name else 1 if re.search(pattern, name) else 2, times.get(suite, 5))
    return [suite for suite in sorted(suites, key=rank) if every or rank(suite)[0] < 2]


def limit_resources():
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 30, 8 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_limited(command, folder, environment, limit_s, guard):
    """Runs a command. Returns ('' or why it failed, seconds), and ends processes that outlive the command."""
    begin = time.monotonic()
    process = subprocess.Popen(command, cwd=folder, env=environment, shell=isinstance(command, str), start_new_session=True,
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               preexec_fn=limit_resources if guard else None)
    try:
        status = process.wait(limit_s)
        failure = '' if status == 0 else f'exit {status}' if status > 0 else f'signal {-status}'
    except subprocess.TimeoutExpired:
        failure = f'no end within {limit_s:.0f} s'
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    return failure, time.monotonic() - begin


class Bench:
    """Runs suites or checks on faults, in several copies of the tree."""

    def __init__(self, arguments):
        self.gpu, self.jobs, self.work = arguments.gpu, arguments.jobs, os.path.abspath(arguments.work)
        self.guard, self.every, cores = not self.gpu, arguments.every, os.cpu_count() or 1
        kind = 'gpu' if self.gpu else 'test'
        names = sorted(name.split('.')[0] for name in os.listdir(os.path.join(TREE, 'tests'))
                       if re.fullmatch(kind + r'_\w+\.(c|cu)', name))
        self.suites = [f'build/tests/{name}' for name in names]
        options = arguments.make.split() if arguments.make is not None else [] if self.gpu else CPU_OPTIONS
        self.build = Build(TREE, self.work, options, self.suites, cores, self.gpu)
        self.trees = queue.Queue()
        for i in range(max(2 * self.jobs, cores)):  # two per job: one with a fault, one without
            self.trees.put(os.path.join(self.work, f'tree-{i}'))
        self.times, self.sound, self.locks, self.data = self.load_times(), {}, {}, os.path.join(self.work, 'data')

    def environment(self, tree):
        return dict(self.build.environment, FDSL_BENCH=os.path.join(tree, PROGRAM))

    def command(self, suite, tree):
        if not self.gpu:
            return [os.path.join(tree, suite), '--fail-fast']
        for name, value in (('$bench', os.path.join(tree, PROGRAM)), ('$tests', os.path.join(tree, 'build/tests')),
                            ('$data', self.data), ('$own', os.path.join(tree, 'build/own'))):
            suite = suite.replace(name, value)
        return suite

    def link(self, suite, tree, replaced):
        """Links the suite, or the test programs of the check, unless the tree has them."""
        outputs = [suite] if not self.gpu else [f'build/tests/{name}' for name in set(re.findall(r'\$tests/(\w+)', suite))]
        for output in outputs:
            if not os.path.exists(os.path.join(tree, output)):
                self.build.relink(output, tree, replaced)

    # ---- Without faults ----

    def is_sound(self, suite):
        """Returns whether a suite passes without a fault. Tests this only when the suite first fails with a fault."""
        with self.locks.setdefault(suite, threading.Lock()):
            if suite not in self.sound:
                failure = self.run_plain(suite)
                self.sound[suite] = not failure
                if failure:
                    print(f'ignored, because it fails without a fault ({failure}): {suite}', file=sys.stderr)
        return self.sound[suite]

    def unsound(self):
        return sorted(suite for suite, passes in self.sound.items() if not passes)

    def run_plain(self, suite):
        tree = self.trees.get()
        try:
            self.renew(tree)
            shutil.copy2(os.path.join(self.build.base, PROGRAM), os.path.join(tree, PROGRAM))
            self.link(suite, tree, set())
            # one success in three runs is enough: on a busy machine, a run may fail
            return self.execute(suite, tree) and self.execute(suite, tree) and self.execute(suite, tree)
        finally:
            self.trees.put(tree)

    def execute(self, suite, tree):
        """Runs a suite. Returns '' or how it failed. Records the time of a suite that passes. Suites are ordered by this time, and
        their time limit depends on it."""
        known_s = self.times.get(suite)
        limit_s = max(30 if self.gpu else 60, 4 * known_s) if known_s else 120 if self.gpu else 400
        failure, elapsed_s = run_limited(self.command(suite, tree), tree, self.environment(tree), limit_s, self.guard)
        if not failure:
            self.times[suite] = max(elapsed_s, known_s or 0)
        return failure

    def store_times(self):
        with open(os.path.join(self.work, 'times.json'), 'w', encoding='utf-8') as file:
            json.dump(self.times, file, indent=1)

    def load_times(self):
        try:
            with open(os.path.join(self.work, 'times.json'), encoding='utf-8') as file:
                return json.load(file)
        except (OSError, ValueError):
            return {}

    def prepare(self):
        os.makedirs(self.data, exist_ok=True)
        program = os.path.join(self.build.base, PROGRAM)
        for name, options in GPU_SETS.items():
            subprocess.run([program, '--prepare', os.path.join(self.data, name), '--store', name.split('-')[1], *options.split()],
                           check=True, stdout=subprocess.DEVNULL)

    # ---- With a fault ----

    def renew(self, tree):
        copy_tree(self.build.base, tree, LEFT_OUT)
        shutil.rmtree(os.path.join(tree, 'build'), ignore_errors=True)
        if os.path.exists(os.path.join(tree, PROGRAM)):
            os.unlink(os.path.join(tree, PROGRAM))
        for suite in self.suites:
            os.makedirs(os.path.dirname(os.path.join(tree, suite)), exist_ok=True)

    def objects_of(self, fault):
        return os.path.join(self.work, 'faults', re.sub(r'\W', '-', f'{fault.id}'))

    def plant(self, fault, tree):
        path = os.path.join(tree, fault.path)
        with open(path, encoding='utf-8') as file:
            lines = file.read().split('\n')
        if lines[fault.line - 1] != fault.before:
            raise SystemExit(f'mutate.py: {fault.path}:{fault.line} is not the line of fault {fault.id}')
        lines[fault.line - 1] = fault.after
        os.unlink(path)
        with open(path, 'w', encoding='utf-8') as file:
            file.write('\n'.join(lines))

    def compile(self, fault):
        """Compiles the fault into the folder objects_of(fault). Returns '' or why the fault cannot be tested."""
        dependent = self.build.dependent(fault.path)
        outputs = [output for output in dependent if not output.startswith('build/tests/test_')] or dependent[:1]
        if not outputs:
            return 'not part of this build'
        tree = self.trees.get()
        try:
            self.renew(tree)
            self.plant(fault, tree)
            with ThreadPoolExecutor(len(outputs)) as pool:
                list(pool.map(lambda output: self.build.execute(output, tree, set(outputs)), outputs))
            if not self.gpu and all(equal(os.path.join(tree, output), os.path.join(self.build.base, output)) for output in outputs):
                return 'same object code'
            shutil.rmtree(self.objects_of(fault), ignore_errors=True)
            for output in outputs:
                target = os.path.join(self.objects_of(fault), output)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                shutil.move(os.path.join(tree, output), target)
            return ''
        except CompileError:
            return 'does not compile'
        finally:
            self.trees.put(tree)

    def test(self, fault):
        """Runs suites or checks until one catches the fault. Returns its name, how it failed and after how long, or ''."""
        tree = self.trees.get()
        try:
            self.renew(tree)
            self.plant(fault, tree)
            replaced, begin = set(), time.monotonic()
            for folder, _, names in os.walk(self.objects_of(fault)):
                for name in names:
                    output = os.path.relpath(os.path.join(folder, name), self.objects_of(fault))
                    os.makedirs(os.path.dirname(os.path.join(tree, output)), exist_ok=True)
                    shutil.copy2(os.path.join(folder, name), os.path.join(tree, output))
                    replaced.add(output)
            self.build.relink(PROGRAM, tree, replaced)
            for suite in self.order(fault):
                caught = self.test_by(suite, fault, tree, replaced)
                if caught:
                    return f'{caught} ({time.monotonic() - begin:.0f} s)'
            return ''
        finally:
            self.trees.put(tree)

    def order(self, fault):
        if self.gpu:
            return [command for pattern, commands in gpu_checks().items() if fault.path.startswith(pattern) for command in commands]
        return suites_for(fault.path, self.suites, self.times, self.every)

    def test_by(self, suite, fault, tree, replaced):
        name = os.path.basename(suite) if not self.gpu else suite
        try:
            for needed in self.build.inputs(suite) if suite in self.build.commands else ():
                if needed.startswith('build/tests/') and fault.path in (self.build.sources_of(needed) or ()):
                    self.build.execute(needed, tree, set())
                    replaced.add(needed)
            self.link(suite, tree, replaced)
        except CompileError:
            return f'{name}: does not compile'
        failure = self.execute(suite, tree)
        if failure and not self.is_sound(suite):
            return ''
        if failure and not failure.startswith('no end'):
            failure = self.execute(suite, tree)
        return f'{name}: {failure}' if failure else ''


def equal(one, other):
    with open(one, 'rb') as a, open(other, 'rb') as b:
        return a.read() == b.read()


def compiled(bench, faults, spares):
    """Compiles the faults. Returns {fault: ''} for faults that can be tested, and {fault: reason and replacement} for the
    other faults. The spares of a folder replace the other faults in order, so the number of jobs does not change the result."""
    verdicts = {}
    wanted = list(faults)
    while wanted:
        with ThreadPoolExecutor(bench.trees.qsize()) as pool:
            verdicts.update(zip(wanted, pool.map(bench.compile, wanted)))
        wanted = []
        for room, reserve in spares.items():
            tried = [fault for fault in verdicts if fault.room == room]
            lacking = sum(fault.id.isdigit() for fault in tried) - sum(not verdicts[fault] for fault in tried)
            wanted += [fault for fault in reserve if fault not in verdicts][:lacking]
    for room in spares:
        used = iter([fault.id for fault in spares[room] if verdicts.get(fault) == ''])
        for fault in [*(fault for fault in faults if fault.room == room), *spares[room]]:
            if verdicts.get(fault):
                verdicts[fault] += f'; replaced by {next(used, "none: no spare is left")}' if fault.id.isdigit() else ''
    return verdicts


# ---- The table ----

HEADER = '| fault | place | operator | before | after | result |\n|---|---|---|---|---|---|\n'


def cell(text):
    return '`' + text.strip().replace('|', '\\|') + '`'


def read_page(path):
    """Returns {fault: row} of the table in an existing page, and the texts before and after the table. With these rows, one table
    can collect CPU runs, GPU runs and single faults."""
    try:
        with open(path, encoding='utf-8') as file:
            before, header, rest = file.read().partition(HEADER)
    except (OSError, TypeError):
        before = header = rest = ''
    if before and not header:
        before += '\n'
    table, after = re.fullmatch(r'((?:\|.*\n)*)(?:\n\d+ of \d+ caught .*\n)?(?:Ignored, because .*\n)*((?s:.*))', rest).groups()
    return {row.split(' | ', 1)[0][2:]: row for row in table.splitlines(True)}, (before, after)


def write_page(path, rows, around, order, notes, unsound):
    """Writes a page of the table and the texts before and after it. Returns the table."""
    text, caught, survived = HEADER, 0, []
    for fault in order:
        row = rows.get(fault.id)
        if row is None:
            continue
        caught += '| caught by ' in row
        if '| survived' in row:
            survived.append(fault)
            reason = notes.get(f'{fault.path}:{fault.line}')
            row = re.sub(r'survived[^|]*\|$', f'survived{": " + reason if reason else ""} |', row.rstrip()) + '\n'
        text += row
    total = caught + len(survived)
    text += f'\n{caught} of {total} caught ({100 * caught / max(total, 1):.0f} %), {len(survived)} survived'
    text += f', {sum(f"{fault.path}:{fault.line}" in notes for fault in survived)} of them with a reason.\n'
    for suite in unsound:
        text += f'Ignored, because it fails without a fault: `{suite}`.\n'
    if path:
        with open(path, 'w', encoding='utf-8') as file:
            file.write(text.join(around))
    return text


def read_notes(path):
    if not path:
        return {}
    with open(path, encoding='utf-8') as file:
        return dict(line.rstrip('\n').split('\t', 1) for line in file if '\t' in line and not line.startswith('#'))


def run(arguments):
    order, omitted = mutate_faults.read_list(arguments.run, TREE)
    for reason in omitted:
        print(f'omitted: {reason}', file=sys.stderr)
    mine = [fault for fault in order if fault.room.startswith('cuda') == arguments.gpu and re.search(arguments.rooms, fault.room)]
    notes, (rows, around) = read_notes(arguments.notes), read_page(arguments.table)
    spares = {}
    for fault in mine:
        spares.setdefault(fault.room, [])
        if not fault.id.isdigit():
            spares[fault.room].append(fault)
    faults = [fault for fault in mine if fault.id.isdigit()]
    if not faults:
        raise SystemExit(f'mutate.py: {arguments.run} has no fault {"in" if arguments.gpu else "outside"} cuda/ in folders that match --rooms')
    bench = Bench(arguments)
    if arguments.gpu:
        bench.prepare()
    only = arguments.only.split(',') if arguments.only else []
    if only and all(name.isdigit() for name in only):  # if --only names no spare, only its faults need compiling
        faults, spares = [fault for fault in faults if fault.id in only], {}
    verdicts = compiled(bench, faults, spares)
    chosen = [fault for fault in verdicts if not only or fault.id in only]

    def judge(fault):
        result = verdicts[fault] or bench.test(fault)
        result = result if verdicts[fault] else f'caught by {result}' if result else 'survived'
        return fault, f'| {fault.id} | `{fault.path}:{fault.line}` | {fault.operator} | {cell(fault.before)} | {cell(fault.after)} | {result} |\n'
    with ThreadPoolExecutor(bench.jobs) as pool:
        for done in as_completed([pool.submit(judge, fault) for fault in chosen]):
            fault, row = done.result()
            rows[fault.id] = row
            print(row, end='', flush=True)
            write_page(arguments.table, rows, around, order, notes, bench.unsound())
            bench.store_times()
    print('\n' + write_page(arguments.table, rows, around, order, notes, bench.unsound()).rsplit('\n\n', 1)[1], end='')


def check(path):
    """Checks that each fault of a list has exactly one line in the sources."""
    faults, omitted = mutate_faults.read_list(path, TREE)
    if omitted:
        raise SystemExit('\n'.join(omitted) + f'\nmutate.py: {len(omitted)} faults do not fit the sources; write the current lines '
                         f'into {path}, or replace faults whose code is gone')
    print(f'{len(faults)} faults fit the sources')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument('--list', action='store_true', help='print a list of faults')
    what.add_argument('--run', metavar='LIST', help='test the faults of a list')
    what.add_argument('--check', metavar='LIST', help='check that each fault of a list has exactly one line in the sources')
    parser.add_argument('--seed', type=int, default=1, help='seed of the list (1)')
    parser.add_argument('--count', type=int, default=60, help='faults in the list, over all folders (60)')
    parser.add_argument('--spares', type=int, default=4, help='spare faults per folder (4)')
    parser.add_argument('--rooms', default='.', help='only folders that match this regular expression')
    parser.add_argument('--gpu', action='store_true', help='test the faults in cuda/, not those outside it')
    parser.add_argument('--jobs', type=int, default=0, help='number of faults tested at a time (default: one per core; with --gpu, 4)')
    parser.add_argument('--every', action='store_true', help='if a fault survives the suites of its folder, run all other suites')
    parser.add_argument('--make', help=f'options of make ({" ".join(CPU_OPTIONS)}; with --gpu none)')
    parser.add_argument('--work', default=os.path.join(TREE, 'build/mutate'), help='folder for the copies (build/mutate)')
    parser.add_argument('--only', help='test only these faults, e.g. 3,7,src/core+1; other rows of the table are kept')
    parser.add_argument('--table', help='write the table to this page; rows of other faults and text around the table are kept')
    parser.add_argument('--notes', help='file with reasons why faults survive')
    arguments = parser.parse_args()
    arguments.jobs = arguments.jobs or (4 if arguments.gpu else os.cpu_count() or 1)
    try:
        if arguments.list:
            faults = mutate_faults.choose(TREE, arguments.seed, arguments.count, arguments.spares, arguments.rooms)
            mutate_faults.write_list(faults, arguments.seed, sys.stdout)
        elif arguments.check:
            check(arguments.check)
        else:
            run(arguments)
    except (OSError, ValueError) as error:
        raise SystemExit(f'mutate.py: {error}') from error


if __name__ == '__main__':
    main()
