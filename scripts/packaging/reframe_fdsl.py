"""ReFrame tests: each runs one variant, verifies it, and reports its rate.

  reframe -c scripts/packaging/reframe_fdsl.py -r                      # on the CPU, with ReFrame's default configuration
  reframe -c scripts/packaging/reframe_fdsl.py -r -S program=$PWD/fdsl-bench
  reframe -C SITE.py -c scripts/packaging/reframe_fdsl.py -r -n fdsl_generate_cuda      # on partitions with the feature cuda

A test passes if the program ends with status 0 and finds no wrong result. `items_per_s` is images or training samples per
second; references for a system are set with ReFrame's `reference`.
"""
import csv

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import parameter, performance_function, run_after, run_before, sanity_function, variable


class FdslTest(rfm.RunOnlyRegressionTest):
    """Runs the program once and reads the row that it prints as CSV."""
    program = variable(str, value='fdsl-bench')
    time_limit = '10m'
    valid_systems = ['*']
    valid_prog_environs = ['*']
    options = []

    @run_before('run')
    def set_command(self):
        self.executable = self.program
        self.executable_opts = [*self.options, '--verify', '--format', 'csv']

    def row(self):
        """Returns the last row that the program printed. With several ranks, it is the row of all ranks."""
        with open(sn.evaluate(self.stdout), newline='', encoding='utf-8') as file:
            return list(csv.DictReader(file))[-1]

    @sanity_function
    def is_right(self):
        return sn.all([sn.assert_eq(self.job.exitcode, 0), sn.assert_eq(self.row()['wrong'], '0')])

    @performance_function('items/s')
    def items_per_s(self):
        return float(self.row()['items_per_s'])


@rfm.simple_test
class fdsl_generate(FdslTest):
    """Generating images on the CPU."""
    kind = parameter(['naive', 'omp'])

    @run_after('init')
    def set_options(self):
        self.options = ['--variant', self.kind, '--batch', '8' if self.kind == 'naive' else '64', '--res', '224']


@rfm.simple_test
class fdsl_generate_cuda(FdslTest):
    """Generating images on a GPU; needs a partition with the feature `cuda`."""
    kind = parameter(['gbase', 'rng', 'bat', 'fused', 'fused-graph'])
    valid_systems = ['+cuda']

    @run_after('init')
    def set_options(self):
        self.options = ['--variant', self.kind, '--batch', '256' if self.kind in ('bat', 'fused', 'fused-graph') else '32']


@rfm.simple_test
class fdsl_train(FdslTest):
    """Training a small network on generated digits, on the CPU."""

    @run_after('init')
    def set_options(self):
        self.options = ['--workload', 'train', '--variant', 'train-omp', '--model', 'lenet', '--train-size', '2000', '--test-size', '500',
                        '--epochs', '2']
