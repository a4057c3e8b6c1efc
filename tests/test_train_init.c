/* Tests --init on the command line: training that starts with the parameters of another training run. */
#include <math.h>
#include <stdint.h>

#include "cells.h"
#include "core/portable.h"
#include "data/tensor_file.h"
#include "train_cli.h"

#ifdef HAVE_XXHASH

/* So few samples that a refusal takes milliseconds, although samples are generated before --init is read. */
#define FEW "--train-size 20 --test-size 5 --batch 5 "

TestSuite(train_init, .init = shell_set_up, .fini = shell_tear_down, .timeout = 300);

/* The learning rate is 0, so parameters keep their initial values. All tensors except those of the last layer
 * must come from the pre-training on synth, although it had another image size and number of classes. If the
 * number of classes is equal, the last layer must come from the pre-training too. */
#ifdef _OPENMP
Test(train_init, fine_tuning_starts_from_the_checkpoint)
{
#define TAUGHT "$P --variant train-omp --model cnn-fdsl --train-size 30 --test-size 10 --batch 10 "
/* KEPT: bytes of all tensors before the last layer. LAST_7: bytes of the last layer for 7 classes. */
#define KEPT   1920768
#define LAST_7 3612
    EXPECT(0, TAUGHT "--data synth --res 16 --classes 7 --epochs 2 --checkpoint pre --export taught");
    EXPECT(0,
           TAUGHT "--data digits --epochs 1 --optimizer sgd --lr 0 --init pre --export begun --format csv");
    cr_expect_not_null(strstr(out,
                              "--init: 18 of 20 tensors taken from pre after 2 epochs of synth; the last "
                              "layer starts with zeros"),
                       "%s", out);
    EXPECT(0, "tail -c %d taught | head -c %d > a && tail -c %d begun | head -c %d > b && cmp a b",
           KEPT + LAST_7, KEPT, KEPT + LAST_7 / 7 * 10, KEPT);
    EXPECT_EXACTLY(0, "0\n", "tail -c %d begun | tr -d '\\0' | wc -c", LAST_7 / 7 * 10);
    EXPECT_PRINTS(0, "20 of 20 tensors",
                  TAUGHT "--data synth --res 16 --classes 7 --epochs 1 --optimizer sgd --lr 0 --export same "
                         "--init pre/epoch-000002.ckpt");
    EXPECT(0, "tail -c %d taught > a && tail -c %d same > b && cmp a b", KEPT + LAST_7, KEPT + LAST_7);
}

/* The rows and the checkpoints record which parameters training started with. A command that starts with the
 * same parameters must resume the training run. A command with other parameters must be rejected. */
Test(train_init, fine_tuning_can_be_resumed)
{
#define FINE TAUGHT "--data digits --seed 1 "
    EXPECT(0, TAUGHT "--data synth --res 8 --classes 7 --epochs 2 --checkpoint pre");
    EXPECT(0, FINE "--epochs 2 --init pre --export whole --out r.csv >/dev/null 2>&1 && cat r.csv");
    char hash[64];
    snprintf(hash, sizeof hash, "%.63s", value(out, 1, "init"));
    cr_expect(strlen(hash) == 16 && strspn(hash, "0123456789abcdef") == 16, "%s", hash);
    cr_expect_str_eq(value(out, 2, "init"), hash);
    EXPECT(0, FINE "--epochs 1 --init pre --checkpoint k --resume");
    EXPECT(0, "mv pre moved && " FINE "--epochs 2 --init moved --checkpoint k --resume --export again");
    EXPECT(0, "cmp whole again");
    EXPECT_PRINTS(2, "in the checkpoint, none now; give the --init with which",
                  FINE "--epochs 3 --checkpoint k --resume");
    EXPECT_PRINTS(
        2, "other options: init=", FINE "--epochs 3 --init moved/epoch-000001.ckpt --checkpoint k --resume");
    EXPECT(0, FINE "--epochs 1 --format csv");
    cr_expect_str_eq(value(out, 1, "init"), "");
}
#endif

#if defined HAVE_JANSSON && defined _OPENMP
/* The tensors of an --export file have the names that timm uses. The learning rate is 0, so parameters keep
 * their initial values. */
Test(train_init, starts_from_a_file_of_tensors)
{
#define VIT  "$P --variant train-omp --model vit-micro --train-size 20 --test-size 4 --batch 10 --epochs 1 "
#define KEEP "--optimizer sgd --lr 0 --format csv "
    EXPECT(0, VIT "--data digits --checkpoint k --export a.safetensors");
    EXPECT_PRINTS(0, "--init: 32 of 32 tensors taken from a.safetensors\n",
                  VIT "--data digits " KEEP "--init a.safetensors --export b");
    /* the same values, and the hash of the checkpoint with the same parameters */
    EXPECT(0, "tail -c 111912 a.safetensors > v && tail -c 111912 b | cmp v -");
    EXPECT(0, VIT "--data digits " KEEP "--init a.safetensors --out r.csv >/dev/null 2>&1; " VIT
                  "--data digits " KEEP "--init k --out r.csv >/dev/null 2>&1; cat r.csv");
    cr_expect_eq(strlen(value(out, 1, "init")), 16);
    EXPECT(0, "cut -d, -f$(head -1 r.csv | tr , '\\n' | grep -nx init | cut -d: -f1) r.csv | tail -2 | uniq "
              "| wc -l");
    cr_expect_eq(atoi(out), 1, "%s", out);
    EXPECT_PRINTS(0, "30 of 32 tensors",
                  VIT "--data synth --res 28 --classes 3 " KEEP "--init a.safetensors --export c");
    EXPECT_EXACTLY(0, "0\n", "tail -c 396 c | tr -d '\\0' | wc -c");
}

/* Opens a file. A path without a slash at its beginning is relative to the folder of the test. */
static void open_tensors(const char *name, struct tensor_file *file)
{
    static char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", *name == '/' ? "" : folder, name);
    cr_assert_eq(tensor_file_open(path, file), STATUS_OK, "%s", status_text());
}

/* Reads a tensor of a file. The caller frees the values. */
static float *read_values(const char *path, const char *name, uint64_t *count)
{
    struct tensor_file file;
    open_tensors(path, &file);
    float *values = NULL;
    for (size_t i = 0; i < file.count; i++)
        if (strcmp(file.tensors[i].name, name) == 0) {
            *count = file.tensors[i].bytes / sizeof *values;
            values = malloc(file.tensors[i].bytes);
            cr_assert_eq(tensor_read(&file, &file.tensors[i], values), STATUS_OK, "%s", status_text());
        }
    tensor_file_close(&file);
    cr_assert_not_null(values, "%s has no %s", path, name);
    return values;
}

#define GOLDEN "%s/tests/data/checkpoints/"

/* The values of tests/data/checkpoints/make.py, times `scale`. */
static void expect_made(const char *path, double scale)
{
    struct tensor_file file;
    open_tensors(path, &file);
    cr_expect_eq(file.count, 32);
    for (size_t t = 0; t < file.count; t++) {
        uint64_t count;
        float *values = read_values(path, file.tensors[t].name, &count);
        for (uint64_t i = 0; i < count; i++)
            cr_assert_eq(values[i],
                         scale * ((double)((31 * strlen(file.tensors[t].name) + 7 * i) % 61) - 30) / 64,
                         "%s, value %d", file.tensors[t].name, (int)i);
        free(values);
    }
    tensor_file_close(&file);
}

/* timm wrote the file, in bf16, with its arguments and a moving average. */
Test(train_init, starts_from_a_checkpoint_of_timm)
{
    EXPECT_PRINTS(0, "timm.pth.tar (state_dict_ema.*)\n",
                  VIT "--data digits " KEEP "--export a.safetensors --init " GOLDEN "timm.pth.tar", root);
    expect_made("a.safetensors", 2);
    EXPECT_PRINTS(
        0, "timm.pth.tar (state_dict.*)\n",
        VIT "--data digits " KEEP "--export b.safetensors --init-ema no --init " GOLDEN "timm.pth.tar", root);
    expect_made("b.safetensors", 1);
    expect_refusal(2, FEW "--model vit-micro --init b.safetensors --init-ema yes",
                   "--init b.safetensors: it has no moving average (state_dict_ema or model_ema)");
    expect_refusal(2, FEW "--init-ema no", "--init-ema needs --init FILE");
}

/* A checkpoint of this program has its moving average beside the parameters. */
Test(train_init, chooses_the_average_of_a_checkpoint)
{
#define LOGREG "$P " SMALL "--epochs 1 "
    EXPECT(0, LOGREG "--ema 0.9 --checkpoint k --export e.safetensors && " LOGREG "--checkpoint l "
                     "--export p.safetensors");
    EXPECT(0, LOGREG KEEP "--init k --export a && " LOGREG KEEP
                          "--init k --init-ema yes --export b && " LOGREG KEEP
                          "--init k --init-ema no --export c");
    EXPECT(0, "tail -c 31400 e.safetensors > v && tail -c 31400 a | cmp - v && tail -c 31400 b | cmp - v && "
              "tail -c 31400 p.safetensors > v && tail -c 31400 c | cmp - v");
    expect_refusal(2, FEW "--model logreg --init l --init-ema yes", "--init l: it has no moving average");
}

/* For images of another size, positions are interpolated as timm does. */
Test(train_init, interpolates_the_positions_of_a_transformer)
{
    static const int sides[] = {1, 3, 5, 8, 14};
    char path[PATH_MAX + 64], name[32];
    snprintf(path, sizeof path, GOLDEN "positions.safetensors", root);
    for (size_t s = 0; s < COUNT_OF(sides); s++) {
        uint64_t count, expected;
        EXPECT(0,
               VIT "--data synth --classes 3 --res %d " KEEP
                   "--init-ema no --export %d.safetensors --init " GOLDEN "timm.pth.tar",
               4 * sides[s], sides[s], root);
        snprintf(name, sizeof name, "7x7 to %dx%d;", sides[s], sides[s]);
        EXPECT_OUT(name);
        snprintf(name, sizeof name, "%d", sides[s]);
        float *theirs = read_values(path, name, &expected);
        snprintf(name, sizeof name, "%d.safetensors", sides[s]);
        float *ours = read_values(name, "pos_embed", &count);
        cr_assert_eq(count, expected);
        cr_expect_eq(memcmp(ours, theirs, 32 * sizeof *ours), 0); /* of the class token */
        for (uint64_t i = 0; i < count; i++)
            cr_assert_leq(fabs((double)ours[i] - theirs[i]), 5e-7, "%d, value %d", sides[s], (int)i);
        free(ours);
        free(theirs);
    }
    /* A checkpoint of this program says the size of its images, which need not be square. */
    EXPECT(0, VIT "--data digits --checkpoint k");
    EXPECT_PRINTS(0, "positions interpolated from 7x7 to 4x4", VIT "--data synth --res 16 --init k");
    EXPECT_EXACTLY(0, "32 of 32 tensors\n",
                   VIT "--data digits --init k 2>&1 | grep -o '32 of 32 tensors' | tail -1");
}

/* Rewrites a.safetensors as x.safetensors with the Python expressions `name` for each name and `type`, the
 * letter of struct.pack() and the type, for its values. */
static void rewrite(const char *name, const char *type)
{
    EXPECT(0,
           "python3 -c 'import json, struct; data = open(\"a.safetensors\", \"rb\").read(); "
           "size = int.from_bytes(data[:8], \"little\"); head = json.loads(data[8:8 + size]); "
           "about = {}; values = b\"\"\n"
           "for n, t in head.items():\n"
           "  if n[0] == \"_\": continue\n"
           "  own = data[8 + size:][slice(*t[\"data_offsets\"])]\n"
           "  own = %s\n"
           "  about[%s] = {\"dtype\": \"%s\", \"shape\": t[\"shape\"], "
           "\"data_offsets\": [len(values), len(values) + len(own)]}\n"
           "  values += own\n"
           "text = json.dumps(about).encode(); open(\"x.safetensors\", \"wb\").write("
           "len(text).to_bytes(8, \"little\") + text + values)'",
           strcmp(type, "F16") == 0
               ? "struct.pack(\"%de\" % (len(own) // 4), *struct.unpack(\"%df\" % (len(own) // 4), own))"
               : "own",
           name, type);
}

/* Values of 16 bits become floats, and prefixes may be nested in any order. */
Test(train_init, starts_from_halves_and_nested_prefixes)
{
    EXPECT(0, VIT "--data digits " KEEP "--export a.safetensors --init " GOLDEN "timm.pth.tar", root);
    rewrite("\"model._orig_mod.module.\" + n", "F16");
    EXPECT_PRINTS(0, "32 of 32 tensors taken from x.safetensors (model._orig_mod.module.*)",
                  VIT "--data digits " KEEP "--init x.safetensors --export b.safetensors");
    expect_made("b.safetensors", 2);
    rewrite("\"model_ema.module.\" + n", "F32");
    expect_refusal(2, FEW "--model vit-micro --init-ema no --init x.safetensors",
                   "--init x.safetensors: it has only a moving average");
    rewrite("(\"module.\" if \"blocks.1\" in n else \"state_dict.model_ema.\") + n", "F32");
    expect_refusal(2, FEW "--model vit-micro --init x.safetensors", "it lacks 12 of the 32 tensors");
    rewrite("\"teacher.\" + n", "F32");
    expect_refusal(2, FEW "--model vit-micro --init x.safetensors",
                   "it lacks 32 of the 32 tensors of vit-micro (the first: patch_embed.proj.weight)");
    EXPECT(0, "$P " SMALL "--epochs 1 --export l.safetensors");
    EXPECT(0, "python3 -c 'import json; data = open(\"l.safetensors\", \"rb\").read(); "
              "size = int.from_bytes(data[:8], \"little\"); values = data[8 + size:]; "
              "about = {p + n: {\"dtype\": \"F32\", \"shape\": s, \"data_offsets\": [b + o, e + o]} "
              "for p, o in ((\"model.\", 0), (\"module.\", len(values))) for n, s, b, e in "
              "((\"fc1.weight\", [10, 784], 0, 31360), (\"fc1.bias\", [10], 31360, 31400))}; "
              "text = json.dumps(about).encode(); open(\"x.safetensors\", \"wb\").write("
              "len(text).to_bytes(8, \"little\") + text + 2 * values)'");
    expect_refusal(2, FEW "--model logreg --init x.safetensors",
                   "it has the tensors of logreg twice, as model.* and module.*; save only one of them");
}

/* Training scripts save the tensors of the model under a key or a prefix, along with other tensors. If a file
 * also has their moving average, the average is taken. The learning rate is 0, so the parameters keep their
 * initial values. */
Test(train_init, starts_from_the_inner_tensors_of_a_file)
{
    static const struct {
        const char *taken, *other;
    } prefixes[] = {{"model", "optimizer"},           {"state_dict", "optimizer"},
                    {"state_dict_ema", "state_dict"}, {"model_ema", "model"},
                    {"module", "optimizer"},          {"state_dict.module", "state_dict.optimizer"}};
    EXPECT(0, "$P " SMALL "--epochs 1 --export a.safetensors && tail -c 31400 a.safetensors >values");
    for (size_t i = 0; i < COUNT_OF(prefixes); i++) {
        char header[1024];
        size_t length = 8;
        for (int second = 0; second < 2; second++) {
            const char *prefix = second ? prefixes[i].taken : prefixes[i].other;
            const int begin = second * 31400;
            length += (size_t)snprintf(header + length, sizeof header - length,
                                       "%c\"%s.fc1.weight\":{\"dtype\":\"F32\",\"shape\":[10,784],"
                                       "\"data_offsets\":[%d,%d]},\"%s.fc1.bias\":{\"dtype\":\"F32\","
                                       "\"shape\":[10],\"data_offsets\":[%d,%d]}",
                                       second ? ',' : '{', prefix, begin, begin + 31360, prefix,
                                       begin + 31360, begin + 31400);
        }
        header[length++] = '}';
        const uint64_t bytes = length - 8;
        memcpy(header, &bytes, sizeof bytes);
        put("header", header, length);
        EXPECT(0, "{ cat header; head -c 31400 /dev/zero; cat values; } >b.safetensors");
        EXPECT(0, "$P " SMALL KEEP "--epochs 1 --init b.safetensors --export c");
        char words[128];
        snprintf(words, sizeof words, "2 of 2 tensors taken from b.safetensors (%s.*)", prefixes[i].taken);
        cr_expect_not_null(strstr(out, words), "%s", out);
        EXPECT(0, "tail -c 31400 c | cmp - values");
    }
}

#ifdef HAVE_ZLIB
/* The same tensors in an archive of NumPy, compressed. */
Test(train_init, starts_from_an_archive_of_numpy)
{
    EXPECT(0, VIT "--data digits --export a.safetensors");
    EXPECT(0, "python3 -c 'import json, zipfile; data = open(\"a.safetensors\", \"rb\").read(); "
              "size = int.from_bytes(data[:8], \"little\"); head = json.loads(data[8:8 + size]); "
              "npz = zipfile.ZipFile(\"a.npz\", \"w\", zipfile.ZIP_DEFLATED); "
              "text = lambda about: str(dict(descr=\"<f4\", fortran_order=False, "
              "shape=tuple(about[\"shape\"]))).encode() + b\"\\n\"; "
              "[npz.writestr(name + \".npy\", b\"\\x93NUMPY\\x01\\x00\" + len(text(about)).to_bytes(2, "
              "\"little\") + text(about) + data[8 + size:][slice(*about[\"data_offsets\"])]) "
              "for name, about in head.items() if name[0] != \"_\"]; npz.close()'");
    EXPECT_PRINTS(0, "--init: 32 of 32 tensors taken from a.npz\n",
                  VIT "--data digits " KEEP "--init a.npz --export b");
    EXPECT(0, "tail -c 111912 a.safetensors > v && tail -c 111912 b | cmp v -");
    EXPECT(0, "cp a.npz c.npz && printf '\\001' | dd of=c.npz bs=1 seek=3000 conv=notrunc status=none");
    EXPECT_PRINTS(1, "c.npz: ", VIT "--data digits --init c.npz 2>&1");
}
#endif

/* Writes x.safetensors: a.safetensors without the tensors whose names begin with `prefix`. Their values are
 * at the end of the file. */
static void drop_tensors(const char *prefix)
{
    EXPECT(0,
           "python3 -c 'import json, sys; data = open(\"a.safetensors\", \"rb\").read(); "
           "size = int.from_bytes(data[:8], \"little\"); head = json.loads(data[8:8 + size]); "
           "kept = {name: about for name, about in head.items() if not name.startswith(\"%s\")}; "
           "end = max(about[\"data_offsets\"][1] for name, about in kept.items() if name[0] != \"_\"); "
           "text = json.dumps(kept).encode(); open(\"x.safetensors\", \"wb\").write("
           "len(text).to_bytes(8, \"little\") + text + data[8 + size:8 + size + end])'",
           prefix);
}

/* A backbone without a last layer is read in the same way as a file with another number of classes. */
Test(train_init, starts_from_a_file_without_the_last_layer)
{
    EXPECT(0, VIT "--data digits --export a.safetensors");
    drop_tensors("head.");
    EXPECT_PRINTS(0, "30 of 32 tensors taken from x.safetensors; the last layer starts with ",
                  VIT "--data digits " KEEP "--init x.safetensors --export c");
    EXPECT_EXACTLY(0, "0\n", "tail -c 1320 c | tr -d '\\0' | wc -c");
    EXPECT(
        0,
        "tail -c 111912 a.safetensors | head -c 110592 > v && tail -c 111912 c | head -c 110592 | cmp v -");
    drop_tensors("head.bias");
    expect_refusal(2, FEW "--model vit-micro --init x.safetensors",
                   "it lacks 1 of the 32 tensors of vit-micro (the first: head.bias)");
}

Test(train_init, rejects_unsuitable_files_of_tensors)
{
    EXPECT(0, VIT "--data digits --export a.safetensors");
    expect_refusal(2, FEW "--model lenet --init a.safetensors",
                   "it lacks 10 of the 10 tensors of lenet (the first: conv1.weight)");
    EXPECT(0, "sed 's/\"shape\":\\[1,50,32\\]/\"shape\":[50,1,32]/' a.safetensors > x.safetensors");
    expect_refusal(2, FEW "--model vit-micro --init x.safetensors",
                   "--init x.safetensors: its pos_embed is 50x1x32, but vit-micro with these samples needs "
                   "1x50x32");
    expect_refusal(
        2,
        "--model vit-tiny --data synth --res 32 --train-size 9 --batch 4 --test-size 2 --init a.safetensors",
        "it lacks 120 of the 152 tensors of vit-tiny");
    EXPECT(0, "sed 's/\"norm.bias/\"norm.bios/' a.safetensors > x.safetensors");
    expect_refusal(2, FEW "--model vit-micro --init x.safetensors",
                   "it lacks 1 of the 32 tensors of vit-micro");
    EXPECT(0, "{ head -c -4 a.safetensors; printf '\\000\\000\\300\\177'; } > x.safetensors");
    expect_refusal(2, FEW "--model vit-micro --init x.safetensors",
                   "--init x.safetensors: its head.bias has values that are NaN or infinite");
    EXPECT(0, "sed 's/F32/I32/' a.safetensors > x.safetensors");
    expect_refusal(2, FEW "--model vit-micro --init x.safetensors",
                   "of type I32; convert all tensors to floats of 32");
    EXPECT(0, "head -c 9000 a.safetensors > x.safetensors");
    expect_refusal(1, FEW "--model vit-micro --init x.safetensors", "--init: x.safetensors");
    expect_refusal(2, FEW "--model vit-micro --init y.safetensors", "--init y.safetensors: No such file");
    EXPECT(0, "$P " SMALL "--epochs 1 --export l.safetensors");
    EXPECT(0, "sed 's/\"fc1.bias\"/\"fc2.bias\"/' l.safetensors > x.safetensors");
    expect_refusal(2, FEW "--model logreg --init x.safetensors", "it lacks 1 of the 2 tensors of logreg");
}
#endif

Test(train_init, rejects_unsuitable_initial_parameters)
{
    EXPECT(0, "$P " SMALL "--epochs 1 --checkpoint k && mkdir empty && echo no > text");
    expect_refusal(2, FEW "--init none", "--init none: No such file");
    expect_refusal(2, FEW "--init empty", "--init empty: the folder has no checkpoint");
    expect_refusal(
        1, FEW "--init text",
        "text: this is not a checkpoint of fdsl-bench; the names of files of tensors must end in ");
    expect_refusal(2, FEW "--init last.pth.tar", "--init last.pth.tar: No such file");
    expect_refusal(2, FEW "--init x.npy", "--init x.npy: a .npy file holds one tensor; give a checkpoint");
    expect_refusal(2, FEW "--model lenet --init k",
                   "--init k: its model is logreg, but this is lenet; use --model logreg, or another");
    expect_refusal(2, FEW "--model logreg --classes 12 --init k",
                   "--init k: no layer can be copied: its only layer has another shape");
    EXPECT(0,
           "$P --variant train-naive --model lenet --train-size 64 --test-size 5 --epochs 1 --checkpoint l");
    expect_refusal(2, "--model lenet --data synth --res 32 --train-size 64 --test-size 5 --init l",
                   "--init l: its fc1.weight is 120x400, but these samples need 120x576; use samples "
                   "of 1x1x28x28 (channels, depth, height, width), or cnn-fdsl, which supports any size");
    EXPECT(0, "truncate -s 5000 k/*");
    expect_refusal(1, FEW "--model logreg --init k", "truncated");
}

#endif
