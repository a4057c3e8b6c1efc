"""Manages copies of the tree, in which faults are compiled and linked. make builds the first copy. For a fault, only the
objects that depend on the changed file are compiled again, with the commands that make prints, and linked with the other
objects."""
import os
import re
import shlex
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

PROGRAM = 'fdsl-bench'
LEFT_OUT = {'.git', 'build', 'data', 'results/plots', PROGRAM}
COMPILE_LIMIT_S = 600
MADE = ('.o', '.a')  # files that can be linked


def same(one, other):
    try:
        a, b = os.stat(one), os.stat(other)
    except OSError:
        return False
    return (a.st_size, a.st_mtime_ns) == (b.st_size, b.st_mtime_ns)


def copy_tree(source, target, left_out):
    """Makes `target` a copy of `source`. Files of equal size and modification time are not copied, so that make does not build
    them again. The paths in `left_out` are neither copied nor removed."""
    kept = set()
    for folder, folders, names in os.walk(source):
        place = os.path.relpath(folder, source)
        folders[:] = [name for name in folders if os.path.normpath(f'{place}/{name}') not in left_out and name != '__pycache__']
        os.makedirs(os.path.join(target, place), exist_ok=True)
        for name in names:
            path = os.path.normpath(f'{place}/{name}')
            kept.add(path)
            if path not in left_out and not same(os.path.join(source, path), os.path.join(target, path)):
                shutil.copy2(os.path.join(source, path), os.path.join(target, path), follow_symlinks=False)
    for folder, folders, names in os.walk(target):
        place = os.path.relpath(folder, target)
        folders[:] = [name for name in folders if os.path.normpath(f'{place}/{name}') not in left_out]
        for name in names:
            if os.path.normpath(f'{place}/{name}') not in kept | left_out:
                os.unlink(os.path.join(folder, name))


class CompileError(Exception):
    pass


class Build:
    """The copy without faults, at `work`/base, and the command that creates each of its files."""

    def __init__(self, tree, work, make_options, targets, jobs, take_build):
        self.base, self.work, self.slots = os.path.join(work, 'base'), work, threading.Semaphore(jobs)
        built = os.path.join(tree, 'build')
        if take_build and not os.path.isdir(self.base) and os.path.isdir(built):
            copy_tree(built, os.path.join(self.base, 'build'), {'mutate'})  # so that make compiles fewer objects
        copy_tree(tree, self.base, LEFT_OUT)
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(('MAKE', 'MFLAGS'))}
        self.environment.update(CCACHE_BASEDIR=work, CCACHE_NOHASHDIR='1')
        text = self.make('-n', '-B', 'V=1', *make_options, 'all', *targets)
        self.commands = {}  # output: words of the command that creates it
        for line in text.replace('\\\n', ' ').split('\n'):
            self.learn(line)
        if PROGRAM not in self.commands:
            raise SystemExit(f'mutate.py: make -n printed no command that links {PROGRAM}')
        self.make(f'-j{jobs}', *make_options, 'all')
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda output: self.execute(output, self.base, set()), filter(self.is_stale, self.commands)))
        for output in self.commands:
            if output.endswith('.a'):
                self.execute(output, self.base, set())

    def make(self, *words):
        made = subprocess.run(['make', *words], cwd=self.base, text=True, env=self.environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, check=False)
        if made.returncode != 0:
            raise SystemExit(f'mutate.py: make {" ".join(words)} failed:\n{made.stdout[-3000:]}')
        return made.stdout

    def learn(self, line):
        """Parses a command of make. A command that both compiles and links a suite becomes two commands."""
        archive = re.search(r'\S*ar rcs\w* (\S+\.a) .*', line)
        if archive:
            self.commands[archive.group(1)] = shlex.split(archive.group())
        if ' -o ' not in line or re.search(r'[|;>]|&&', line):
            return
        words = shlex.split(line)
        output = words[words.index('-o') + 1]
        sources = [word for word in words[1:] if re.fullmatch(r'[\w./-]+\.(c|cu|S)', word)]
        if sources and '-c' not in words:
            drop = [i for i, word in enumerate(words) if word in ('-MF', '-o') or words[i - 1] in ('-MF', '-o')]
            plain = [word for i, word in enumerate(words) if i not in drop and word not in ('-MMD', '-MP', *sources)]
            made = output + '.c.o'
            flags = [word for word in plain if not re.match(r'-l|-L|-Wl|.*\.[ao]$', word)]
            self.commands[made] = [*flags, '-MMD', '-MF', made + '.d', '-c', '-o', made, *sources]
            words = [plain[0], '-o', output, made, *plain[1:]] if plain[0] != 'ccache' else plain[:2] + ['-o', output, made, *plain[2:]]
        self.commands[output] = words

    def inputs(self, output):
        return [word for word in self.commands[output] if word.endswith(MADE) and word != output]

    def sources_of(self, output):
        """Returns the files that an object was compiled from, from its dependency file, or None if that file is missing."""
        words = self.commands[output]
        listing = words[words.index('-MF') + 1] if '-MF' in words else re.sub(r'\.o$', '.d', output)
        try:
            with open(os.path.join(self.base, listing), encoding='utf-8') as file:
                return set(re.split(r'[\s:\\]+', file.read())) - {''}
        except OSError:
            return None

    def is_stale(self, output):
        """Returns whether an object of a suite must be compiled in the base. make does not build these objects."""
        if '-c' not in self.commands[output] or '/tests/' not in output:
            return False
        sources, path = self.sources_of(output), os.path.join(self.base, output)
        if sources is None or not os.path.exists(path):
            return True
        names = (os.path.join(self.base, name) for name in sources)
        return any(not os.path.exists(name) or os.stat(name).st_mtime_ns > os.stat(path).st_mtime_ns
                   for name in names if not name.endswith('.o'))

    def dependent(self, path):
        """Returns the objects that depend on this source or header."""
        return [output for output in self.commands if '-c' in self.commands[output] and path in (self.sources_of(output) or ())]

    def execute(self, output, tree, replaced):
        """Runs the command of one output in a tree. Links the objects in `replaced` from that tree, all others from the base."""
        target = os.path.join(tree, output)
        words = [target if word == output else self.place(word, tree, replaced) if word.endswith(MADE) else word
                 for word in self.commands[output]]
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.exists(target):
            os.unlink(target)  # ar would keep the old members
        with self.slots:
            try:
                made = subprocess.run(words, cwd=tree, env=self.environment, text=True, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, timeout=COMPILE_LIMIT_S, check=False)
            except subprocess.TimeoutExpired as error:
                raise CompileError(f'{output}: the compiler took more than {COMPILE_LIMIT_S} s') from error
        if made.returncode != 0:
            raise CompileError(f'{output}: {made.stdout[-2000:]}')

    def place(self, path, tree, replaced):
        return os.path.join(tree if path in replaced else self.base, path)

    def relink(self, output, tree, replaced):
        """Links an output again. First rebuilds its archives and linked device code, if they contain replaced objects."""
        for needed in self.inputs(output):
            if needed not in replaced and needed in self.commands and replaced.intersection(self.inputs(needed)):
                self.execute(needed, tree, replaced)
                replaced.add(needed)
        self.execute(output, tree, replaced)
