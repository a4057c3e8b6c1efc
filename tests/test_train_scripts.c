/* Tests the scripts that compare training runs, with a stub module in place of PyTorch. */
#include "shell.h"

#include "cells.h"
#include "synth/formula.h"

TestSuite(train_scripts, .init = shell_set_up, .fini = shell_tear_down, .timeout = 300);

/* Tests scripts/compare/pytorch.py with a stub module in place of PyTorch. The stub has no CUDA. */
Test(train_scripts, rejects_impossible_comparisons)
{
    if (run("command -v python3") != 0)
        return;
    EXPECT(
        0,
        "mkdir -p s/torch/nn && echo 'float32 = float64 = float16 = int64 = int32 = uint8 = 0' > s/numpy.py "
        "&& "
        "echo 'functional = Module = object' > s/torch/nn/__init__.py && "
        "printf 'def is_available(): return False\\n' > s/torch/distributed.py && cat > s/torch/__init__.py "
        "<<'END'\n"
        "from . import nn, distributed\n"
        "__version__ = '0'\n"
        "def no_grad(): return lambda call: call\n"
        "def set_num_threads(threads): pass\n"
        "class device:\n"
        "    def __init__(self, name):\n"
        "        self.type = name.split(':')[0]\n"
        "        if self.type not in ('cpu', 'cuda', 'meta'): raise RuntimeError('many words')\n"
        "class cuda:\n"
        "    is_available = staticmethod(lambda: False)\n"
        "END\n");
#define COMPARE "PYTHONPATH=s %s/scripts/compare/pytorch.py --bench $P "
    EXPECT_PRINTS(4, "compare/pytorch.py: --device cuda: PyTorch 0 sees no GPU", COMPARE "--device cuda",
                  root);
    static const struct {
        const char *options, *words;
    } refused[] = {
        {"--device foo", "--device foo: give cpu, cuda, or a GPU as cuda:1"},
        {"--device meta", "--device meta: give cpu"},
        {"--variant train-naive,all", "--variant train-naive,all: name variants of training"},
        {"--variant infer-omp", "name variants of training"},
        {"--variant train-naive,train-omp --checkpoint k", "--checkpoint works with one variant at a time"},
        {"--format json", "--format is set here"},
        {"--form=csv", "--format is set here"},
        {"--out /dev/stdout", "--out /dev/stdout: several programs append rows to it"},
        {"--out s", "--out s: several programs append rows to it"},
        {"--gradients --out r.csv", "--gradients compares one step, without --out"},
        {"--gradients --modes resident", "--gradients compares one step, without --out, --modes"},
        {"--workers -1", "--workers -1: give at least 1"},
        {"--threads -2", "--threads -2: give at least 1"},
        {"--threads 0", "--threads 0: give at least 1"},
        {"--device cpu:0 --modes graph", "graph and lower precisions need --device cuda"},
        {"--device cpu:0 --precision bf16", "graph and lower precisions need --device cuda"},
        {"--modes resident,best", "--modes best: PyTorch 0 has no Inductor here"},
        {"--gradients --ranks 1", "--gradients compares one step on one rank; remove --ranks"},
        {"--ranks 1,2 --checkpoint k", "--checkpoint and --export work with one number of ranks only"},
        {"--ranks 1,2 --expo k", "--checkpoint and --export work with one number of ranks only"},
        {"--sync mpi", "--sync mpi needs several ranks; add --ranks 1,2"},
        {"--ranks 1 --sync mpi,nccl", "--sync mpi,nccl needs several ranks; add --ranks 1,2"},
    };
    for (size_t i = 0; i < COUNT_OF(refused); i++) {
        run(COMPARE "%s", root, refused[i].options);
        expect_line(2, refused[i].words);
    }
    run("PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=s:%s/scripts/compare python3 -c 'import pytorch as c, sys; "
        "c.main = lambda: print(1); "
        "sys.exit(c.program())' > /dev/full",
        root);
    expect_line(1, "compare/pytorch.py: output cannot be written: No space left on device");
    static const char *const numbers[] = {"0", "1,0", "-1", "two", "1,"};
    for (size_t i = 0; i < COUNT_OF(numbers); i++) {
        EXPECT_PRINTS(2, "': give numbers of at least 1, such as 1,2,4\n", COMPARE "--ranks=%s", root,
                      numbers[i]);
    }
    EXPECT_EXACTLY(4,
                   "compare/pytorch.py: --ranks 1: PyTorch 0 has no gloo here; install another build, or "
                   "remove --ranks\n",
                   COMPARE "--ranks 1", root);
    EXPECT_EXACTLY(
        4,
        "compare/pytorch.py: --ranks 2: mpirun is not installed; install Open MPI (openmpi-bin), or "
        "use --ranks 1\n",
        "mkdir -p bin && ln -sf \"$(python3 -c 'import sys; print(sys.executable)')\" bin/python3 && "
        "PATH=$PWD/bin " COMPARE "--ranks 1,2",
        root);
    EXPECT_EXACTLY(
        2,
        "fdsl-bench: --model: 'lenett' is not one of logreg, lenet, cnn, cnn3d, cnn-fdsl, "
        "cnn-deep, mlp, vit-micro, vit-tiny, vit-small, vit-base, vit-large, resnet-micro, resnet50; did "
        "you mean 'lenet'?\n",
        COMPARE "--model lenett", root);
    EXPECT_PRINTS(2, "none: No such file or directory; build it", COMPARE "--bench none", root);
}

/* Tests two outputs of the comparison: the table, and the line about a failed rank. The reason of a failure
 * is in the files of the ranks or in the output of torchrun. */
Test(train_scripts, the_comparison_reports_ranks_and_failures)
{
    if (run("command -v python3") != 0)
        return;
    EXPECT_EXACTLY(
        0,
        "PyTorch failed on 2 ranks: last words; try --ranks 1 (output: LOG)\n"
        "PyTorch failed on 2 ranks: rank 1: ended by signal 9; lower --batch or --ranks (output: LOG)\n"
        "PyTorch failed on 2 ranks in mode best: rank 1: ValueError: bad; leave best out of --modes (output: "
        "LOG)\n"
        "PyTorch failed on 4 ranks in mode graph: rank 3: OutOfMemoryError: CUDA out of memory; lower "
        "--batch or "
        "--ranks (output: LOG)\n"
        "ranks variant         exchange  batch set-up s    samples/s efficiency     loss to 99% s acc end\n"
        "    1 a                             8     1.00        100.0      1.000   0.5000           0.9000\n"
        "    2 a               mpi          16     2.00        150.0      0.750   0.5000      1.5  0.9000\n"
        "    2 b               mpi          16     3.00        100.0              0.5000      1.5  0.9000\n"
        "batch: samples per step, summed over all ranks; weak scaling\n",
        "cat > ranks.py <<'END'\n"
        "import json, sys, types\n"
        "import torch_ranks as t\n"
        "def fault(rank, time, mode, reason):\n"
        "    with open(f'fault.{rank}', 'w') as file: json.dump({'time': time, 'mode': mode, 'rank': rank, "
        "'reason': reason}, file)\n"
        "print(t.message_of(2, '.', 'a\\n last words \\n\\n', 'LOG'))\n"
        "log = '  rank      : 0 (local_rank: 0)\\n  exitcode  : 1 (pid: 7)\\n'\n"
        "print(t.message_of(2, '.', log + log.replace('0', '1').replace(': 1 (pid', ': -9 (pid'), 'LOG'))\n"
        "fault(0, 5.0, 'best', 'RuntimeError: connection closed')\n"
        "fault(1, 4.0, 'best', 'ValueError: bad')\n"
        "print(t.message_of(2, '.', log, 'LOG'))\n"
        "fault(3, 3.0, 'graph', 'OutOfMemoryError: CUDA out of memory')\n"
        "print(t.message_of(4, '.', log, 'LOG'))\n"
        "for name in ('torch', 'torch.nn', 'torch_training'): sys.modules[name] = types.ModuleType(name)\n"
        "sys.modules['torch.nn'].functional = 0\n"
        "for name in ('EFFORTS', 'MODELS', 'MODES', 'PRECISIONS', 'Net', 'optimizer_of', 'part', "
        "'read_data', "
        "'read_safetensors', 'step_errors', 'trained', 'training_of'): "
        "setattr(sys.modules['torch_training'], name, 0)\n"
        "import pytorch\n"
        "row = {'ranks': '1', 'variant': 'a', 'exchange': '', 'batch': '8', 'items_per_s': '100', 'scaling': "
        "'', "
        "'train_loss': '0.5', 'to_99_s': '', 'test_acc': '0.9'}\n"
        "two = {**row, 'ranks': '2', 'exchange': 'mpi', 'batch': '16', 'scaling': 'weak', 'to_99_s': '1.5'}\n"
        "pytorch.print_ranks([(1, [row, {**row, 'items_per_s': '300'}, row]), (2, [{**two, 'items_per_s': "
        "'150'}]), "
        "(3, [{**two, 'variant': 'b'}])])\n"
        "END\n"
        "PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=%s/scripts/compare python3 ranks.py",
        root);
    /* Tests the script without PyTorch. */
    run("mkdir -p n && echo 'raise ImportError(\"no torch\")' > n/torch.py && PYTHONPATH=n "
        "%s/scripts/compare/pytorch.py --ranks "
        "1,2",
        root);
    expect_line(4, "compare/pytorch.py: no torch; install PyTorch and NumPy");
    EXPECT_PRINTS(0, "scripts/compare/pytorch.py --ranks 1,2 --variant train-graph",
                  "PYTHONPATH=n %s/scripts/compare/pytorch.py --help", root);
}

/* A script that is ended must end the training run that it started in the background. */
Test(train_scripts, resume_ends_its_training)
{
    static const char *const hang[] = {"*--export*", "*--checkpoint*"}; /* in the first run, in the second */
    for (size_t i = 0; i < COUNT_OF(hang); i++) {
        EXPECT(0,
               "rm -rf run pid; printf '#!/bin/sh\\ncase \"$*\" in %s) echo $$ >pid; exec sleep 100 ;; "
               "esac\\n' >bench && chmod +x bench",
               hang[i]);
        EXPECT_EXACTLY(0, "status 143\n",
                       "(FDSL_BENCH=./bench exec %s/scripts/check/resume.sh run --epochs 1 & of=$!; "
                       "for i in $(seq 1500); do [ -s pid ] && break; sleep 0.02; done; "
                       "kill -TERM $of; wait $of; echo status $?; ! ps -o stat= -p $(cat pid))",
                       root);
    }
}

/* A signal waits until the script has stored the process that it starts, whichever thread receives it. */
Test(train_scripts, signals_wait_for_the_start_of_a_process)
{
    if (run("command -v python3") != 0)
        return;
    put_script("held.py", "import os, signal, threading, time\n"
                          "import shared\n"
                          "def main():\n"
                          "    threading.Thread(target=time.sleep, args=[1], daemon=True).start()\n"
                          "    with shared.signals_held():\n"
                          "        os.kill(os.getpid(), signal.SIGTERM)\n"
                          "        time.sleep(0.1)\n"
                          "        print('stored', flush=True)\n"
                          "    print('not ended')\n"
                          "shared.run_script('held.py', main)\n");
    EXPECT_EXACTLY(143, "stored\n", "PYTHONPATH=%s/scripts/compare python3 held.py", root);
}

Test(train_scripts, resume_refuses_its_own_options_and_names_the_cause)
{
    EXPECT_EXACTLY(2, "check/resume.sh: this script sets --log itself; leave it out (see --help)\n",
                   "FDSL_BENCH=$P %s/scripts/check/resume.sh run --log x", root);
    EXPECT_PRINTS(1, "did you mean 'lenet'? (see run/whole.txt)",
                  "FDSL_BENCH=$P %s/scripts/check/resume.sh run --variant train-naive --model lenett", root);
    EXPECT_EXACTLY(2, "check/resume.sh: run exists; name a new folder, or remove this one\n",
                   "FDSL_BENCH=$P %s/scripts/check/resume.sh run --epochs 1", root);
}

/* scripts/compare/pretrain_formulas.py pre-trains, fine-tunes, and writes one file of rows. A second start
 * finds all runs complete, and other settings are refused. */
Test(train_scripts, formulas_are_pretrained_and_fine_tuned)
{
    if (run("command -v python3") != 0)
        return;
#define FORMULAS                                                                                             \
    "FDSL_BENCH=$P %s/scripts/compare/pretrain_formulas.py --variant train-omp --model vit-micro --out-res " \
    "28 --sets visualatom,ofdb-1k --images 128 --epochs 2 --batch 32 --classes 4 --held-out 8 "              \
    "--checkpoint-steps 1 --sizes 20:2 --seeds 0,1 --test-size 10 --tune-batch 10 --data digits --work w "   \
    "--out f/rows.csv "
    EXPECT_PRINTS(0, "0 of 8 runs are complete; the same command continues", FORMULAS "--limit-s 5", root);
    EXPECT_PRINTS(0, "| from scratch |", FORMULAS "--gpus 2", root);
    EXPECT_PRINTS(0, "8 of 8 runs are complete", FORMULAS, root);
    EXPECT_PRINTS(0, "| VisualAtom | 128 |", FORMULAS, root);
    /* Two epochs of both pre-training runs, and the last epoch of two seeds of three kinds of fine-tuning */
    EXPECT_EXACTLY(0, "11\n", "wc -l < f/rows.csv");
    EXPECT_EXACTLY(0, "2 ofdb-1k\n2 visualatom\n",
                   "grep -E ',synth,' f/rows.csv | sed 's/.*,//' | sort | uniq -c | sed 's/^ *//'");
    EXPECT_EXACTLY(0, "2 ofdb-1k\n2 scratch\n2 visualatom\n",
                   "grep -E ',digits,' f/rows.csv | sed 's/.*,//' | sort | uniq -c | sed 's/^ *//'");
    EXPECT_PRINTS(2, "w has runs with --batch 32; give the same value, or another --work",
                  FORMULAS "--batch 16", root);
    EXPECT_PRINTS(2, "no set 'fractal'; choose from fractaldb-1k, rcdb-1k", FORMULAS "--sets fractal", root);
    EXPECT_PRINTS(2, "--sizes are pairs", FORMULAS "--sizes 20", root);
#ifndef HAVE_CUDA
    EXPECT_PRINTS(4, "without a GPU, give --variant train-omp",
                  FORMULAS "--work v --variant train-vit --model vit-tiny --out-res 32", root);
#endif
#undef FORMULAS
}

/* The training runs of scripts/compare/pretrain_formulas.py end with the script. */
Test(train_scripts, pretraining_ends_with_its_script)
{
    if (run("command -v python3") != 0)
        return;
    EXPECT(0,
           "printf '#!/bin/sh\\ncase \"$*\" in --columns*) exec '$P' \"$@\" ;; *--dry-run) exit 0 ;; esac\\n"
           "echo $$ >pid; exec sleep 100\\n' >bench && chmod +x bench");
    EXPECT_PRINTS(
        0, "visualatom stopped; it will continue from its latest checkpoint",
        "(FDSL_BENCH=./bench exec %s/scripts/compare/pretrain_formulas.py --sets visualatom --work w --out "
        "r.csv & of=$!; for i in $(seq 500); do [ -s pid ] && break; sleep 0.02; done; "
        "kill -TERM $of; wait $of; echo status $?; ! ps -o stat= -p $(cat pid))",
        root);
}

/* If the variant cannot run, scripts must end before they generate any data. */
Test(train_scripts, scripts_check_the_variant_first)
{
    EXPECT_EXACTLY(2, "usage: scripts/compare/fine_tuning.sh DIR FILE\n", "%s/scripts/compare/fine_tuning.sh",
                   root);
    EXPECT(2, "%s/scripts/compare/live_training.sh d", root);
    EXPECT_PRINTS(
        2, "did you mean 'lenet'?\n",
        "VARIANT=train-naive MODEL=lenett FDSL_BENCH=$P %s/scripts/compare/live_training.sh d r.csv", root);
#ifndef HAVE_CUDA
    EXPECT_PRINTS(4, "VARIANT=train-omp\n", "FDSL_BENCH=$P %s/scripts/compare/live_training.sh d r.csv",
                  root);
    EXPECT_PRINTS(4, "VARIANT=train-omp\n", "FDSL_BENCH=$P %s/scripts/compare/fine_tuning.sh digits r.csv",
                  root);
#endif
    EXPECT(2, "ls d r.csv");
}

/* Makes a program that runs the CPU's counterparts of variants on a GPU, with smaller work. */
static void put_stand_in(void)
{
    put_script("bench", "#!/bin/sh\n"
                        "case \"$*\" in *--columns* | *--prepare* | *--dry-run*train-vit*) exec "
                        "\"$FDSL_BENCH_REAL\" \"$@\" ;; esac\n"
                        "echo \"$*\" >>log\n"
                        "set -- $(echo \"$*\" | sed 's/fused/omp/; s/train-[a-z]*/train-omp/; "
                        "s/vit-[a-z]*/logreg/; s/--model cnn/--model lenet "
                        "--train-size 500 --test-size 10/; s/out-res 224/out-res 28/; s/ --res 224/ --res "
                        "28/; s/--batch 256 --ver/--batch 2 "
                        "--res 32 --ver/; s/--min-time 0.3 --max-time 1/--min-time 0 --max-time 0.01/')\n"
                        "exec \"$FDSL_BENCH_REAL\" \"$@\"\n");
}

/* scripts/compare/training.sh trains on the same number of images per epoch from every source, and takes
 * other numbers for each network. */
Test(train_scripts, training_takes_images_and_epochs_of_each_network)
{
#define TRAINING "FDSL_BENCH_REAL=$P FDSL_BENCH=./bench MEMORY=$PWD/m %s/scripts/compare/training.sh d r.csv"
    put_stand_in();
    EXPECT_PRINTS(2, "compare/training.sh: EPOCHS: '0' is not a whole number from 1\n", "EPOCHS=0 " TRAINING,
                  root);
    EXPECT_PRINTS(2, "compare/training.sh: SAMPLES: give one number, or one per network of MODELS\n",
                  "SAMPLES='1 2 3' " TRAINING, root);
    EXPECT(0, "MODELS=none SOURCES='jpeg raw' IMAGES=300 " TRAINING " 2>&1 && ls m && ! ls r.csv d", root);
    EXPECT_OUT("jpeg\nraw\n");
    EXPECT(0,
           "MODELS='vit-tiny vit-base' SAMPLES='256 300' EPOCHS='2 1' SOURCES='constant raw' " TRAINING
           " 2>&1 >/dev/null | grep -v warning; python3 -c 'import csv; print(*((row[\"feed\"], "
           "row[\"train_samples\"], row[\"epoch\"]) for row in "
           "csv.DictReader(open(\"r.csv\"))), sep=\"\\n\")'",
           root);
    cr_expect_str_eq(
        out,
        "('constant', '256', '1')\n('constant', '256', '2')\n('load', '256', '1')\n('load', '256', '2')\n"
        "('constant', '300', '1')\n('load', '300', '1')\n");
    EXPECT_PRINTS(2, "there are only 300 samples; give at most this number",
                  "MODELS=vit-tiny SAMPLES=301 SOURCES=raw " TRAINING, root);
#undef TRAINING
}

/* scripts/compare/gpus.py runs every formula of the program, continues, and keeps its limit of time. */
Test(train_scripts, gpus_are_measured_part_by_part)
{
    if (run("command -v python3") != 0)
        return;
#define GPUS                                                                                                 \
    "FDSL_BENCH_REAL=$P %s/scripts/compare/gpus.py --bench ./bench --gpus 1 --mnist digits --memory $PWD/m " \
    "o "
    put_stand_in();
    EXPECT_PRINTS(2, "compare/gpus.py: no part 'x'; choose from training, ", GPUS "--parts x", root);
    EXPECT_PRINTS(2, "compare/gpus.py: --gpus are numbers such as 1,2,4", GPUS "--gpus 0", root);
    EXPECT_PRINTS(0, "# training-vit-base-jpeg-1: 12 s\n", GPUS "--dry-run", root);
    cr_expect(strstr(out, "torchrun_rank.py") && strstr(out, "--ranks 1 ") && !strstr(out, "exchange-"), "%s",
              out);
    char none[96], all[48], names[256] = "formula";
    snprintf(none, sizeof none,
             "0 of %d runs are complete; no time for: formulas-uji-1, formulas-visualatom-1, ",
             FORMULA_COUNT + 1);
    snprintf(all, sizeof all, "%d of %d runs are complete\n", FORMULA_COUNT + 1, FORMULA_COUNT + 1);
    for (int f = 0; f < FORMULA_COUNT; f++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "\n%s", formula_names[f]);
    EXPECT_PRINTS(0, none, GPUS "--parts formulas,peer --limit-s 9", root);
    EXPECT_PRINTS(0, all, GPUS "--parts formulas,peer && cut -d, -f21 o/formulas.csv", root);
    cr_expect(strstr(out, names), "%s", out);
    EXPECT_PRINTS(0, all, GPUS "--parts formulas,peer", root);
    cr_expect(!strstr(out, "done after"), "%s", out);
    EXPECT_PRINTS(0, "peer-train-graph-cnn-1: done after ",
                  "rm o/runs/peer* && " GPUS "--parts formulas,peer", root);
    cr_expect(!strstr(out, "formulas-uji-1: done"), "%s", out);
    EXPECT(0, "wc -l <o/peer.csv");
    cr_expect_str_eq(out, "11\n");
    put_script("bench", "#!/bin/sh\necho $$ >pid\nexec sleep 100\n");
    EXPECT_PRINTS(0, "0 of 1 runs are complete; no time for: peer-train-graph-cnn-1\n",
                  "rm o/runs/peer* && " GPUS "--parts peer --limit-s 13.1 && ! ps -o stat= -p $(cat pid)",
                  root);
    put_script("bench", "#!/bin/sh\necho fdsl-bench: bad >&2\nexit 3\n");
    EXPECT_PRINTS(1, "peer-train-graph-cnn-1: FAILED with status 3: fdsl-bench: bad (see ",
                  GPUS "--parts peer", root);
    EXPECT_OUT("0 of 1 runs are complete; failed: peer-train-graph-cnn-1\n");
#undef GPUS
}

/* scripts/compare/clips.sh measures reading, feeding and training on one set. The second start repeats
 * nothing. */
Test(train_scripts, clips_are_read_and_trained_on)
{
#define CLIPS "CLIPS=40 LOOPS=3 EPOCHS=2 BATCH=16 FDSL_BENCH=$P %s/scripts/compare/clips.sh d o"
    EXPECT_EXACTLY(2, "usage: scripts/compare/clips.sh DIR OUT\n",
                   "FDSL_BENCH=$P %s/scripts/compare/clips.sh d", root);
    EXPECT_EXACTLY(2, "compare/clips.sh: LOOPS=0: give a whole number from 1\n",
                   "LOOPS=0 FDSL_BENCH=$P %s/scripts/compare/clips.sh d o", root);
    EXPECT_PRINTS(0, "\nfiles-omp ", CLIPS " 2>/dev/null", root);
    EXPECT_OUT("\nshards-omp ", " 3 loops s", "\none constant batch ", "\nfiles  ", "\nshards  ");
    EXPECT(0, "head -qn 1 o/*.csv | wc -l; wc -l <o/clips_train.csv; cut -d, -f7 o/clips_load.csv | sort -u");
    EXPECT_OUT("3\n7\nfiles-omp\n");
    EXPECT(0, "rm o/clips/train-files.csv && " CLIPS " 2>&1 >/dev/null | grep -v warning", root);
    cr_expect_str_eq(out, "train-files\n");
    EXPECT_PRINTS(2, "o/clips has runs of other settings (clips 40 loops 3 ",
                  "FDSL_BENCH=$P %s/scripts/compare/clips.sh d o", root);
#undef CLIPS
}
