/* The workload `train`: its options, its checks and its input. A run is one epoch and gives one row. */
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/array.h"
#include "core/text.h"
#include "data/checksum.h"
#include "data/remote.h"
#include "data/set_stream.h"
#include "data/tensor_file.h"
#include "machine/comm.h"
#include "train/augment.h"
#include "train/checkpoint.h"
#include "train/engine.h"
#include "train/layer_precision.h"
#include "train/pipeline.h"
#include "train/train.h"
#include "train/trainer.h"

/* ---- Options ---- */

static const char *const optimizers[] = {OPTIMIZERS(OPTIMIZER_NAME) NULL};
static const char *const feeds[] = {"stored", "live",  "constant",
                                    "load",   "mixed", NULL};       /* in the order of enum data_feed */
static const char *const mix_labels[] = {"joined", "offset", NULL}; /* in the order of enum data_mix_labels */
static const char *const schedules[] = {"constant",   "step", "multistep", "cosine",
                                        "polynomial", "tanh", NULL}; /* in the order of enum schedule_kind */
static const char *const losses[] = {"cross-entropy", "bce", NULL};  /* in the order of enum loss_kind */
static const char *const interpolations[] = {"bilinear", "bicubic", "random",
                                             NULL}; /* in the order of enum resample_choice */
static const char *const generators[] = {"auto", "fused", "bat", "gbase", "omp", NULL};
static const char *const recipe_names[] = {"none", "paper", "pdp2026", "cvpr2023", "deit", NULL};
static const char *const lr_scales[] = {"none", "linear", "sqrt", NULL};   /* in the order of enum lr_scale */
static const char *const parallels[] = {"data", "pipeline", "auto", NULL}; /* in the order of enum parallel */

#define AT(field) offsetof(struct train_parameters, field)
static const struct option_spec options[] = {
    JOB_OPTIONS(
        struct train_parameters, "digits", "data to train on", "", "all; 10000 of generated data",
        "all; 2000 of generated data", "0.1",
        "all of a preset of synth that is a list or a published set; otherwise 10; 8 for clips; for class "
        "folders, data sets of --prepare and URLs, the largest label plus 1",
        "64", "", "uji", "as stored; synth: --res", "resize", "3", "fail"),
    {"recipe", "NAME", OPTION_CHOICE, AT(recipe), .fallback = "none", .choices = recipe_names,
     .help = "replace the defaults of other options by those of published scripts (docs/recipes.md): pdp2026 "
             "and cvpr2023 pre-train on VisualAtom, deit trains on ImageNet; paper is an earlier "
             "approximation of pdp2026. Add --help or --dry-run to see the values. NAME is one of"},
    {"model", "NAME", OPTION_CHOICE, AT(model), .fallback = "cnn", .choices = model_names, .column = COLUMN,
     .help = "the network"},
    {"batch", "N", OPTION_COUNT, AT(job.batch), .fallback = "64", .minimum = 1, .maximum = 1 << 20,
     .choices = option_max, .column = COLUMN,
     .help = "samples per step. With several ranks: samples per rank (--scaling weak) or of all ranks "
             "together (--scaling strong). max finds the largest batch that fits into memory"},
    {"drop-last", NULL, OPTION_FLAG, AT(drop_last), .column = COLUMN,
     .help =
         "leave out the last batch of every epoch if it is short. Its samples differ from epoch to epoch"},
    {"epochs", "N", OPTION_COUNT, AT(epochs), .fallback = "5", .minimum = 1, .maximum = 1 << 20,
     .column = COLUMN, .help = "epochs; one row per epoch"},
    {"optimizer", "NAME", OPTION_CHOICE, AT(optimizer), .fallback = "adam", .choices = optimizers,
     .column = COLUMN,
     .help = "the update rule, as torch.optim defines it; lamb as in timm, muon as its author describes it "
             "(with adamw for all but hidden matrices). Options of other rules are refused"},
    {"lr", "RATE", OPTION_REAL, AT(lr), .fallback = "0.001", .maximum = 1e38, .column = COLUMN,
     .help = "learning rate after the warm-up"},
    {"momentum", "M", OPTION_REAL, AT(momentum), .fallback = "0.9", .maximum = 1, .column = COLUMN,
     .help = "momentum of the update"},
    {"beta1", "B", OPTION_REAL, AT(beta1), .fallback = "0.9", .maximum = 0.999999, .column = COLUMN,
     .help = "decay rate of the first moment"},
    {"beta2", "B", OPTION_REAL, AT(beta2), .fallback = "0.999", .maximum = 0.9999999, .column = COLUMN,
     .help = "decay rate of the second moment"},
    {"epsilon", "E", OPTION_REAL, AT(epsilon), .fallback = "1e-8", .minimum = 1e-30, .maximum = 1,
     .column = COLUMN, .help = "epsilon in the denominator of the update"},
    {"weight-decay", "W", OPTION_REAL, AT(weight_decay), .fallback = "0", .maximum = 1e3, .column = COLUMN,
     .help = "weight decay: W times the parameters is added to the gradient; adamw shrinks the parameters "
             "instead. In the networks vit-*, it applies neither to norms, biases and positions "
             "nor to the class token"},
    {"lr-schedule", "KIND", OPTION_CHOICE, AT(schedule), .fallback = "constant", .choices = schedules,
     .column = COLUMN, .help = "how the learning rate changes over the steps"},
    {"lr-warmup", "EPOCHS", OPTION_REAL, AT(lr_warmup), .fallback = "0", .maximum = 1e6, .column = COLUMN,
     .help = "epochs over which the learning rate rises linearly to --lr"},
    {"lr-step", "EPOCHS", OPTION_REAL, AT(lr_step), .fallback = "10", .minimum = 1e-3, .maximum = 1 << 20,
     .column = COLUMN,
     .help = "epochs between two decays of --lr-schedule step, as in 10.75, counted from the start of "
             "training, including the warm-up"},
    {"lr-milestones", "E1:E2:...", OPTION_TEXT, AT(lr_milestones), .column = COLUMN,
     .help = "epochs after which --lr-schedule multistep decays, ascending, at most 8"},
    {"lr-gamma", "G", OPTION_REAL, AT(lr_gamma), .fallback = "0.1", .maximum = 1, .column = COLUMN,
     .help = "decay factor of --lr-schedule step and multistep"},
    {"lr-power", "P", OPTION_REAL, AT(lr_power), .fallback = "1", .maximum = 100, .column = COLUMN,
     .help = "power of --lr-schedule polynomial; 1 is a linear decay"},
    {"lr-min", "RATE", OPTION_REAL, AT(lr_min), .fallback = "0", .maximum = 1e38, .column = COLUMN,
     .help = "learning rate at the end of --lr-schedule cosine, polynomial and tanh"},
    {"lr-cycles", "N", OPTION_COUNT, AT(lr_cycles), .fallback = "1", .minimum = 1, .maximum = 1 << 20,
     .column = COLUMN,
     .help = "how often --lr-schedule cosine, polynomial and tanh repeat their decay, each time from --lr"},
    {"lr-warmup-updates", "N", OPTION_COUNT, AT(lr_warmup_updates), .minimum = 1, .maximum = 1 << 30,
     .column = COLUMN, .help = "length of the warm-up in steps, instead of --lr-warmup"},
    {"lr-step-updates", "N", OPTION_COUNT, AT(lr_step_updates), .minimum = 1, .maximum = 1 << 30,
     .column = COLUMN, .help = "steps between two decays of --lr-schedule step, instead of --lr-step"},
    {"lr-overlap", NULL, OPTION_FLAG, AT(lr_overlap), .column = COLUMN,
     .help = "count the decay of --lr-schedule cosine, polynomial and tanh from the first step, including "
             "the warm-up, as in timm without --warmup-prefix"},
    {"label-smoothing", "S", OPTION_REAL, AT(label_smoothing), .fallback = "0", .maximum = 1,
     .column = COLUMN, .help = "share of the target probability that is spread evenly over all classes"},
    {"loss", "NAME", OPTION_CHOICE, AT(loss), .fallback = "cross-entropy", .choices = losses,
     .column = COLUMN,
     .help = "the loss: softmax cross-entropy, or binary cross-entropy of each class. NAME is one of"},
    {"clip-norm", "NORM", OPTION_REAL, AT(clip_norm), .minimum = 1e-30, .maximum = 1e30, .column = COLUMN,
     .help = "scale the gradients of a step down if their Euclidean norm over all parameters is larger than "
             "this"},
    {"accumulate", "N", OPTION_COUNT, AT(accumulate), .fallback = "1", .minimum = 1, .maximum = 1 << 20,
     .column = COLUMN,
     .help = "compute the gradients of a step in N parts of its batch, one after another, to save memory"},
    {"ema", "DECAY", OPTION_REAL, AT(ema), .minimum = 1e-6, .maximum = 0.9999999, .column = COLUMN,
     .help =
         "also keep an exponential moving average of the parameters with this decay per step, and test it"},
    {"layer-decay", "D", OPTION_REAL, AT(layer_decay), .fallback = "1", .minimum = 1e-6, .maximum = 1,
     .column = COLUMN,
     .help =
         "multiply the learning rate of each block of a transformer by D, relative to the block after it"},
    {"muon-lr", "RATE", OPTION_REAL, AT(muon_lr), .fallback = "0.02", .maximum = 1e38, .column = COLUMN,
     .help = "learning rate of the hidden matrices of --optimizer muon after the warm-up. It follows the "
             "schedule of --lr, which is for the other parameters"},
    {"warmup-lr", "RATE", OPTION_REAL, AT(warmup_lr), .maximum = 1e38, .column = COLUMN,
     .help = "learning rate of the first step of --lr-warmup (default: --lr divided by the steps of the "
             "warm-up)"},
    {"lr-cooldown", "EPOCHS", OPTION_REAL, AT(lr_cooldown), .maximum = 1e6, .column = COLUMN,
     .help = "epochs at the end of training, after the decay, with the learning rate --lr-min"},
    {"lr-cycle-decay", "G", OPTION_REAL, AT(lr_cycle_decay), .minimum = 1e-6, .maximum = 1, .column = COLUMN,
     .help = "factor of the first learning rate from one of --lr-cycles to the next (default: 1)"},
    {"lr-k-decay", "K", OPTION_REAL, AT(lr_k_decay), .minimum = 1e-3, .maximum = 100, .column = COLUMN,
     .help = "exponent of the part of a decay that is done (k-decay); with more than 1, the learning rate "
             "stays high for longer (default: 1)"},
    {"lr-noise", "EPOCH", OPTION_REAL, AT(lr_noise), .maximum = 1e6, .column = COLUMN,
     .help = "from this epoch on, multiply the learning rate by 1 + n, where n is normal noise with standard "
             "deviation 1, drawn anew in each epoch"},
    {"lr-noise-limit", "L", OPTION_REAL, AT(lr_noise_limit), .fallback = "0.67", .minimum = 0.01,
     .maximum = 1, .column = COLUMN,
     .help = "limit of the noise of --lr-noise: larger values are drawn again"},
    {"clip-value", "V", OPTION_REAL, AT(clip_value), .minimum = 1e-30, .maximum = 1e30, .column = COLUMN,
     .help = "limit each gradient to the range from -V to V"},
    {"clip-adaptive", "F", OPTION_REAL, AT(clip_adaptive), .minimum = 1e-6, .maximum = 1e6, .column = COLUMN,
     .help = "adaptive gradient clipping (AGC): scale the gradients of each output's weights down if their "
             "norm is larger than F times that of the weights, as in 0.01; not in the last layer"},
    {"ema-warmup", NULL, OPTION_FLAG, AT(ema_warmup), .column = COLUMN,
     .help = "let the decay of --ema rise: it is at most 1 - (1 + steps)^(-2/3)"},
    {"bce-sum", NULL, OPTION_FLAG, AT(bce_sum), .column = COLUMN,
     .help = "add up the losses of all classes with --loss bce, instead of their mean"},
    {"bce-threshold", "T", OPTION_REAL, AT(bce_threshold), .maximum = 1, .column = COLUMN,
     .help = "replace the targets of --loss bce, which --label-smoothing, --mixup and --cutmix change, by 1 "
             "if they are more than T, and by 0 otherwise"},
    {"bce-pos-weight", "W", OPTION_REAL, AT(bce_pos_weight), .minimum = 1e-6, .maximum = 1e6,
     .column = COLUMN, .help = "weight of the right class in --loss bce (default: 1)"},
    {"loss-scale", "S", OPTION_REAL, AT(loss_scale), .minimum = LOSS_SCALE_LEAST, .maximum = LOSS_SCALE_MOST,
     .column = COLUMN,
     .help = "first scale of the loss (only train-amp, train-vit-amp and train-resnet-amp; default: 65536)"},
    {"loss-scale-growth", "G", OPTION_REAL, AT(loss_scale_growth), .minimum = 1.0001, .maximum = 1024,
     .column = COLUMN,
     .help = "factor of the loss scale after --loss-scale-interval steps without overflow (default: 2)"},
    {"loss-scale-backoff", "B", OPTION_REAL, AT(loss_scale_backoff), .minimum = 1e-3, .maximum = 0.9,
     .column = COLUMN, .help = "factor of the loss scale after a step that overflowed (default: 0.5)"},
    {"loss-scale-interval", "N", OPTION_COUNT, AT(loss_scale_interval), .minimum = 1, .maximum = 1 << 30,
     .column = COLUMN, .help = "steps without overflow after which the loss scale grows (default: 2000)"},
    {"lr-cycle-mul", "M", OPTION_REAL, AT(lr_cycle_mul), .minimum = 1, .maximum = 100, .column = COLUMN,
     .help = "factor of the length of a cycle from one of --lr-cycles to the next (default: 1)"},
    {"fp32-layers", "NAME,...", OPTION_TEXT, AT(fp32_layers), .column = COLUMN,
     .help = "compute these layers in fp32: names, or patterns such as conv*. Variants in TF32 and 16 bits "
             "list the layers that they can compute in fp32; column overflow_layers has those that overflow"},
    {"drop-path", "RATE", OPTION_REAL, AT(drop_path), .maximum = 0.99, .column = COLUMN,
     .help = "rate of stochastic depth in the last block of a transformer; it rises linearly from 0 in the "
             "first block (default: the network's own rate)"},
    {"checkpoint-activations", NULL, OPTION_FLAG, AT(checkpoint_activations), .column = COLUMN,
     .help = "save memory: compute the forward pass of each block again in the backward pass (only train-vit "
             "and train-vit-amp)"},
    {"dropout", "RATE", OPTION_REAL, AT(dropout), .maximum = 0.99, .column = COLUMN,
     .help = "rate of the network's dropout layers, rounded to a multiple of 1/256 (default: the network's "
             "own rates)"},
    {"head-init-scale", "S", OPTION_REAL, AT(head_init_scale), .maximum = 1e6, .column = COLUMN,
     .help = "multiply the initial parameters of the last layer by this"},
    {"head-init-bias", "B", OPTION_REAL, AT(head_init_bias), .minimum = -1e6, .maximum = 1e6,
     .column = COLUMN, .help = "initial biases of the last layer"},
    {"zero-init-last-gamma", NULL, OPTION_FLAG, AT(zero_init_last_gamma), .column = COLUMN,
     .help = "begin with weights of zero in the last normalisation of each residual block, as torchvision's "
             "zero_init_residual and timm's default: each block then begins as its shortcut"},
    {"sync-batch-norm", NULL, OPTION_FLAG, AT(sync_batch_norm), .column = COLUMN,
     .help = "normalise over the samples of all ranks, as PyTorch's SyncBatchNorm; without this, each rank "
             "normalises over its own samples"},
    {"feed", "HOW", OPTION_CHOICE, AT(job.feed), .choices = feeds, .column = COLUMN,
     .help =
         "where training samples come from. stored reads or generates all samples before training (default, "
         "except for synth); live generates each batch during training (only for synth, where it is the "
         "default); load reads and decodes each batch during training, from class folders, tar shards, files "
         "of MNIST or CIFAR or rows of embeddings of any size, as in --data photos/ --feed load --out-res "
         "224 --fit random-resized-crop (--threads decode, and RandomResizedCrop crops the whole image anew "
         "in each epoch); constant repeats the first batch, to measure the "
         "speed without the cost of input; mixed mixes sources in each batch: --mix. HOW is one of"},
    {"mix", "NAME[=URL]:W,...", OPTION_TEXT, AT(job.mix.mix), .column = COLUMN,
     .help = "the sources of --feed mixed and their weights, as in load:0.3,synth:0.7: load is --data, synth "
             "is generated and never repeats an image, and NAME=URL:W is a further folder or URL of shards. "
             "Each step has the exact shares. synth:auto,load chooses the largest share of load with which "
             "steps do not wait, at the start, and keeps it"},
    {"mix-epoch", "NAME", OPTION_TEXT, AT(job.mix.epoch), .column = COLUMN,
     .help = "the source of --mix whose samples an epoch has exactly once; the others go on where the "
             "previous epoch ended. Its test set is used (default: the first one that is read)"},
    {"mix-labels", "HOW", OPTION_CHOICE, AT(job.mix.labels), .fallback = "joined", .choices = mix_labels,
     .column = COLUMN,
     .help = "labels of --feed mixed: joined keeps the numbers of the classes of each source; with offset, "
             "the classes of each source follow those of the source before it in --mix. HOW is one of"},
    {"mix-weights-at", "STEP:W,W[/...]", OPTION_TEXT, AT(job.mix.weights_at), .column = COLUMN,
     .help = "other weights of the sources of --mix from a step on, counted from 1 over all epochs. The "
             "source of --mix-epoch keeps its share"},
    STREAM_LANES_OPTION(AT(job.lanes), "--feed load"),
    {"shuffle", "N", OPTION_COUNT, AT(job.shuffle), .fallback = STREAM_TEXT_OF(STREAM_SHUFFLE),
     .maximum = 2147483647, .column = COLUMN,
     .help = "size of the shuffle buffer of --feed load, divided equally among --lanes. Blocks of up to 256 "
             "consecutive samples are shuffled first. 0 keeps the order of the files"},
    STREAM_PREFETCH_OPTION(AT(job.ahead), "--feed load"),
    STREAM_RESIDENT_OPTION(AT(job.resident_bytes), "--feed load", ""),
    STREAM_DEVICE_OPTION(AT(job.resident_device_bytes), "--feed load on a GPU"),
    {"decoder", "NAME", OPTION_CHOICE, AT(decoder), .fallback = "auto", .choices = decoder_names,
     .column = COLUMN_APART,
     .help = "what decodes the JPEG files of --feed load: cpu, --threads, with the exact pixels; hardware, "
             "the JPEG engines of the GPU, or hybrid, nvJPEG's CUDA kernels, for --device-share of the "
             "samples. auto takes the first of hardware, hybrid and cpu that exists, and cpu on a CPU and "
             "without --out-res. NAME is one of"},
    STREAM_SHARE_OPTION(AT(device_share), COLUMN_APART),
    CACHE_OPTIONS(AT(job.cache_dir), AT(job.cache_bytes),
                  ". With --data synth, it keeps the orbits of fractals"),
    {"generator", "NAME", OPTION_CHOICE, AT(generator), .fallback = "auto", .choices = generators,
     .column = COLUMN, .help = "which variant of synth generates live samples. NAME is one of"},
    {"fresh", NULL, OPTION_FLAG, AT(job.fresh), .column = COLUMN,
     .help = "with --feed live, generate new samples in every epoch"},
    {"shift", "PIXELS", OPTION_COUNT, AT(shift), .fallback = "0", .maximum = 1 << 12, .column = COLUMN,
     .help = "shift each training sample at random, vertically and horizontally, by up to this many pixels, "
             "and fill the gaps with zeros"},
    {"flip", NULL, OPTION_FLAG, AT(flip), .column = COLUMN,
     .help = "flip each training sample left to right with probability 1/2"},
    {"interpolation", "HOW", OPTION_CHOICE, AT(job.filter), .fallback = "bilinear", .choices = interpolations,
     .column = COLUMN,
     .help = "how --fit random-resized-crop resizes training samples, and how operations of --rand-augment "
             "rand-... move their pixels; random draws one of the two each time. HOW is one of"},
    {"rand-augment", "POLICY", OPTION_TEXT, AT(rand_augment), .choices = option_words, .column = COLUMN,
     .help = "apply operations of RandAugment to each training sample: those of torchvision with a magnitude "
             "of 0 to 30, as in 28; those of timm, as in rand-m9-mstd0.5-inc1; or those of the PDP 2026 "
             "scripts, as in pdp2026-m28; none: off (default: none)"},
    {"rand-augment-ops", "N", OPTION_COUNT, AT(rand_augment_ops), .fallback = "2", .minimum = 1,
     .maximum = 16, .column = COLUMN, .help = "number of operations that --rand-augment applies to a sample"},
    {"erasing", "P", OPTION_REAL, AT(erasing), .fallback = "0", .maximum = 1, .column = COLUMN,
     .help = "probability that a rectangle of a training sample is filled with noise"},
    {"erase-last", NULL, OPTION_FLAG, AT(erase_last), .column = COLUMN,
     .help = "fill the rectangles of --erasing after samples are mixed, so that noise is not mixed"},
    {"mixup", "ALPHA", OPTION_REAL, AT(mixup), .fallback = "0", .maximum = 1000, .column = COLUMN,
     .help = "mix pairs of training samples and their labels (MixUp), with weights drawn from Beta(ALPHA, "
             "ALPHA); 0: off"},
    {"cutmix", "ALPHA", OPTION_REAL, AT(cutmix), .fallback = "0", .maximum = 1000, .column = COLUMN,
     .help = "replace a rectangle of each training sample by that of another one (CutMix); the area of the "
             "rectangle, as a fraction of the image, is drawn from Beta(ALPHA, ALPHA); 0: off. With --mixup "
             "as well, each step draws one of the two"},
    {"repeats", "N", OPTION_COUNT, AT(repeats), .fallback = "1", .minimum = 1, .maximum = 64,
     .column = COLUMN,
     .help = "repeated augmentation: each step has N differently augmented copies of each of its samples"},
    CROP_OPTIONS(AT(job.crop)),
    JITTER_OPTIONS(AT(color), "training samples"),
    {"raw", NULL, OPTION_FLAG, AT(raw), .column = COLUMN,
     .help = "do not normalise samples with the training set's mean and standard deviation"},
    MEAN_OPTIONS(AT(mean), AT(std), COLUMN, "the training set's mean",
                 "the training set's standard deviation"),
    {"cudnn-benchmark", NULL, OPTION_FLAG, AT(cudnn_benchmark), .column = COLUMN,
     .help = "measure the algorithms of cuDNN and take the fastest (only train-cudnn and train-cudnn-tf32)"},
    {"seed", "N", OPTION_COUNT, AT(seed), .fallback = "0", .maximum = 18446744073709551615.0,
     .column = COLUMN, .help = "seed of the initial parameters, order, dropout and augmentation"},
    {"sync", "METHOD", OPTION_CHOICE, AT(sync), .fallback = "auto", .choices = exchange_names,
     .column = COLUMN,
     .help =
         "how ranks add up their gradients. mpi adds them up in host memory. The other methods are for "
         "GPU variants: nccl uses NVIDIA's library; with peer, GPUs of one machine read each other's "
         "memory; peer-bf16 is peer with gradients sent as bf16; peer-fused is peer that also updates "
         "the parameters, and each rank holds only the moments of its share; mpi-cuda passes GPU addresses "
         "to MPI_Allreduce. auto takes the first of peer, nccl and mpi that works. METHOD is one of"},
    {"lr-scale", "RULE", OPTION_CHOICE, AT(lr_scale), .fallback = "none", .choices = lr_scales,
     .column = COLUMN,
     .help = "how --lr changes with the number of ranks. With --scaling weak, N ranks have N times the "
             "batch: linear multiplies --lr by N, sqrt by the square root of N, and none leaves --lr "
             "unchanged. With --scaling strong, every rule leaves --lr unchanged. RULE is one of"},
    {"balance", "HOW", OPTION_TEXT, AT(balance), .fallback = "equal", .column = COLUMN,
     .help = "how ranks divide the samples of a step: equal; measured, by the speeds measured in each epoch; "
             "memory, by free memory; or in proportion to numbers, one per rank, such as 3:1"},
    {"parallel", "HOW", OPTION_CHOICE, AT(parallel), .fallback = "data", .choices = parallels,
     .column = COLUMN,
     .help = "how ranks divide a step. With data, each rank has the whole network and a part of the samples. "
             "With pipeline, each rank has some layers, and micro-batches of all samples pass through the "
             "ranks. auto measures steps of the ways that fit into memory, and takes the fastest; it also "
             "decides on --checkpoint-activations. HOW is one of"},
    {"stages", "S", OPTION_COUNT, AT(stages), .minimum = 1, .maximum = MODEL_LAYERS_MAX, .column = COLUMN,
     .help = "stages into which --parallel pipeline cuts the network; must divide the number of ranks, which "
             "is the default"},
    {"microbatches", "M", OPTION_COUNT, AT(micros), .fallback = "8", .minimum = 1, .maximum = 1 << 16,
     .column = COLUMN, .help = "parts into which --parallel pipeline divides the samples of a step"},
    {"schedule", "NAME", OPTION_CHOICE, AT(pipe_schedule), .fallback = "1f1b", .choices = pipe_schedule_names,
     .column = COLUMN,
     .help = "the order in which --parallel pipeline computes its micro-batches. gpipe computes all forward "
             "passes first. 1f1b alternates forward and backward passes. zb-h1 is like 1f1b, but computes "
             "gradients of weights while 1f1b would wait. NAME is one of"},
    {"memory-limit", "SIZE[,SIZE]", OPTION_TEXT, AT(memory_limit), .column = COLUMN,
     .help = "use at most this much memory per GPU, as if it had no more (CPU variants: per rank): one size "
             "for all ranks, or one per rank, such as 16G,8G"},
    {"memory", NULL, OPTION_FLAG, AT(memory),
     .help = "print where the memory goes, as planned before it is allocated, and after the last epoch; with "
             "--dry-run only the plan"},
    {"init", "FILE|DIR", OPTION_TEXT, AT(init),
     .help =
         "start with the parameters in this file, or in the latest checkpoint of this folder. The file "
         "is a checkpoint, or a file of --export or torch.save() whose name ends in .safetensors, .npz, "
         ".pt, .pth or .pth.tar. The model must be the same. If the number of classes differs, or the file "
         "has no last layer, that layer starts with zeros. For another image size, the positions of a "
         "transformer are interpolated"},
    {"init-ema", "WHICH", OPTION_CHOICE, AT(init_ema), .fallback = "auto", .choices = init_ema_names,
     .help = "whether --init takes the moving average of the parameters (state_dict_ema or model_ema in a "
             "file of another program): auto takes it if there is one. WHICH is one of"},
    {"init-state", "FILE", OPTION_TEXT, AT(begin_path),
     .help = "begin with the batch at which this state of a stream was saved: by Loader.save_state() in "
             "Python, or by --export-state. Samples, --seed, --shuffle, --lanes and the samples per step "
             "must be the same"},
    {"checkpoint", "DIR", OPTION_TEXT, AT(checkpoint),
     .help = "write a checkpoint into this folder after every epoch"},
    {"keep", "N", OPTION_COUNT, AT(keep), .fallback = "3", .minimum = 1, .maximum = 1 << 20,
     .help = "number of checkpoints to keep"},
    {"checkpoint-steps", "N", OPTION_COUNT, AT(checkpoint_steps), .minimum = 1, .maximum = 1 << 30,
     .help = "also write a checkpoint every N steps, counted over all epochs"},
    {"resume", NULL, OPTION_FLAG, AT(resume),
     .help = "continue from the latest checkpoint in the folder of --checkpoint, or start from the beginning "
             "if there is none"},
    {"log", "FILE", OPTION_OUTPUT, AT(log_path),
     .help = "append rows about the steps within the epochs to this CSV file"},
    {"log-steps", "N", OPTION_COUNT, AT(log_steps), .fallback = "100", .minimum = 1, .maximum = 1 << 30,
     .help = "steps between two rows of --log, counted over all epochs"},
    {"test-steps", "N", OPTION_COUNT, AT(test_steps), .minimum = 1, .maximum = 1 << 30,
     .help = "also test the network every N steps, counted over all epochs, and append a row to the file of "
             "--log"},
    {"export", "FILE", OPTION_OUTPUT, AT(export_path),
     .help = "write the parameters after the last epoch as safetensors, which PyTorch can load; the name "
             "must end in .safetensors, or have no ending"},
    {"export-state", "FILE", OPTION_OUTPUT, AT(state_path),
     .help = "write the position in the stream of --feed load with each checkpoint and after the last epoch, "
             "for --init-state and for Loader.load_state() in Python"},
    {"export-step", "FILE", OPTION_OUTPUT, AT(step_path),
     .help = "write the first step as safetensors: its samples, gradients (before clipping and weight decay) "
             "and loss, and the parameters before and after it; add --dry-run to stop afterwards"},
    {"export-data", "FILE", OPTION_OUTPUT, AT(data_path),
     .help = "write the training set, the test set and the initial parameters as safetensors; add --dry-run "
             "to stop afterwards"},
    {"save-batch", "N:DIR", OPTION_TEXT, AT(save_batch),
     .help = "write the first N samples of the first step as PNG files into this new or empty folder, as the "
             "network sees them; add --dry-run to stop afterwards"},
    {"allow-nan", NULL, OPTION_FLAG, AT(allow_nan), .help = "continue if the loss is not finite"},
    {"verify-steps", "N", OPTION_COUNT, AT(verify_steps), .fallback = "10", .minimum = 1, .maximum = 1 << 20,
     .help = "number of steps that --verify compares with the reference before the first epoch"},
};

static const struct option_section sections[] = {
    {"data", "data"},
    {"training and test set", "train-size"},
    {"generated images", "classes"},
    {"image format", "out-res"},
    {"feed", "feed"},
    {"loading", "lanes"},
    {"generated images", "generator"},
    {"network", "model"},
    {"training", "recipe"},
    {"training", "batch"},
    {"optimizer", "optimizer"},
    {"learning rate", "lr-schedule"},
    {"learning rate details", "lr-warmup-updates"},
    {"loss", "label-smoothing"},
    {"optimizer", "clip-norm"},
    {"learning rate details", "warmup-lr"},
    {"optimizer", "clip-value"},
    {"loss", "bce-sum"},
    {"learning rate details", "lr-cycle-mul"},
    {"network", "drop-path"},
    {"augmentation", "shift"},
    {"image format", "raw"},
    {"color augmentation", "color-jitter"},
    {"network", "cudnn-benchmark"},
    {"training", "seed"},
    {"parallel training", "sync"},
    {"network", "init"},
    {"output", "checkpoint"},
    {"exports", "export"},
    {"training", "allow-nan"},
    {"what to run", "verify-steps"},
    {NULL, NULL},
};

/* ---- Recipes (docs/recipes.md) ---- */

/* The samples of `paper` and `pdp2026`; other data than synth leave them out. */
#define PAPER_SAMPLES                                                                                    \
    "data", "synth", "preset", "paper-1000", "classes", "1000", "train-size", "1000000", "fresh", "yes", \
        "res", "512"
/* How the published scripts train. */
#define SCRIPTS_TRAIN                                                                                     \
    "out-res", "224", "channels", "3", "drop-last", "yes", "optimizer", "adamw", "lr", "0.001",           \
        "weight-decay", "0.05", "label-smoothing", "0.1", "drop-path", "0.1", "erasing", "0.25", "mixup", \
        "0.8", "cutmix", "1", "mean", "0.485,0.456,0.406", "std", "0.229,0.224,0.225"

/* The options of the recipe `paper`. The warm-up is 5000 steps of 256 samples. */
static const char *const paper[] = {
    PAPER_SAMPLES,
    /* how to train */
    "out-res", "224", "channels", "3", "mean", "0.5", "std", "0.5", "batch", "256", "drop-last", "yes",
    "optimizer", "adamw", "lr", "0.001", "lr-schedule", "cosine", "lr-warmup", "1.28", "weight-decay", "0.05",
    "label-smoothing", "0.1", "drop-path", "0.1", "flip", "yes", "rand-augment", "28", "rand-augment-ops",
    "2", "erasing", "0.25", "mixup", "0.8", "cutmix", "1", NULL};
/* pretrain/pretrain_cuda_optim/ of hpca-uji/fdsl-gpu-pipeline: 4 GPUs with 256 samples each. */
static const char *const pdp2026[] = {
    PAPER_SAMPLES,
    /* how to train */
    SCRIPTS_TRAIN, "batch", "1024", "fit", "random-resized-crop", "interpolation", "bicubic", "rand-augment",
    "pdp2026-m28", "rand-augment-ops", "2", "erase-last", "yes", "lr-schedule", "step", "lr-gamma", "0.5",
    "lr-step-updates", "42000", "lr-warmup-updates", "5000", "warmup-lr", "1e-6", NULL};
/* scripts/pretrain.sh of masora1030/CVPR2023-FDSL-on-VisualAtom: 128 GPUs with 64 samples each. */
static const char *const cvpr2023[] = {
    /* the samples; left out with other data than synth */
    "data", "synth", "formula", "visualatom", "preset", "visualatom", "classes", "21000", "train-size",
    "21000000", "res", "512",
    /* how to train */
    SCRIPTS_TRAIN, "batch", "8190", "repeats", "3", "fit", "random-resized-crop", "interpolation", "random",
    "rand-augment", "rand-m9-mstd0.5-inc1", "erase-last", "yes", "lr-schedule", "cosine", "lr-min", "1e-5",
    "lr-overlap", "yes", "lr-warmup-updates", "5000", "warmup-lr", "1e-6", NULL};
/* main.py of facebookresearch/deit, with 1024 samples per step. */
static const char *const deit[] = {
    /* how to train */
    SCRIPTS_TRAIN, "batch", "1023", "repeats", "3", "fit", "random-resized-crop", "interpolation", "bicubic",
    "flip", "yes", "rand-augment", "rand-m9-mstd0.5-inc1", "lr-schedule", "cosine", "lr-min", "1e-5",
    "lr-overlap", "yes", "lr-warmup", "5", "warmup-lr", "1e-6",
    /* the average, which is tested, too */
    "ema", "0.99996", NULL};

/* Per recipe: its options, and how many entries at the start describe the samples; other --data than synth
 * leave these out. */
static const struct {
    const char *const *options;
    int samples;
} recipes[] = {{NULL, 0}, {paper, 12}, {pdp2026, 12}, {cvpr2023, 12}, {deit, 0}};

static const char *const *train_defaults(int argc, char *const argv[])
{
    const char *recipe = options_peek(options, COUNT_OF(options), argc, argv, "recipe");
    const char *data = options_peek(options, COUNT_OF(options), argc, argv, "data");
    const bool others = data && strcmp(data, "synth") != 0;
    for (size_t i = 1; recipe && i < COUNT_OF(recipes); i++)
        if (strcmp(recipe, recipe_names[i]) == 0)
            return recipes[i].options + (others ? recipes[i].samples : 0);
    return NULL;
}

/* ---- Which options have an effect ---- */

/* Returns true if --fit random-resized-crop applies. */
static bool crops(const struct train_parameters *parameters)
{
    return parameters->job.out_res && parameters->job.fit == FIT_RANDOM_RESIZED_CROP;
}

/* Returns true if operations of timm's RandAugment interpolate as --interpolation says. */
static bool interpolates(const struct train_parameters *parameters)
{
    return parameters->rand_augment && strncmp(parameters->rand_augment, "rand", 4) == 0;
}

/* Returns true if --mean and --std normalise the samples. */
static bool has_mean(const struct train_parameters *parameters)
{
    return !parameters->raw && parameters->mean && parameters->std;
}

/* Returns true if the generator paints lines of different orbits in any order. Its images then differ in some
 * bits from those of the reference, and from run to run. */
static bool draws_other_bits(const struct train_parameters *parameters)
{
    return parameters->generator == GENERATOR_BAT || parameters->generator == GENERATOR_GBASE;
}

/* Returns whether training samples are read while they are used. */
static bool loads(const struct train_parameters *parameters)
{
    return parameters->job.feed == DATA_LOAD || parameters->job.feed == DATA_MIXED;
}

/* If `option` belongs to other optimizers than that of --optimizer, returns "--optimizer" and their names.
 * Otherwise returns NULL. */
static const char *lacking_optimizer(const struct train_parameters *parameters, const char *option)
{
    static const char *const momentum[] = {"momentum", NULL}, *const adam[] = {"beta1", "beta2", "epsilon",
                                                                               NULL};
    static char needed[80];
    const struct {
        const char *name;
        bool takes;
    } all[] = {
#define OPTIMIZER_TAKES(constant, name, moments, takes_momentum, takes_betas) \
    {name, (takes_momentum && is_one_of(option, momentum)) || (takes_betas && is_one_of(option, adam))},
        OPTIMIZERS(OPTIMIZER_TAKES)
#undef OPTIMIZER_TAKES
    };
    bool any = false;
    snprintf(needed, sizeof needed, "--optimizer ");
    for (size_t i = 0; i < COUNT_OF(all); i++) {
        if (all[i].takes)
            text_append(needed, sizeof needed, "%s%s", any ? " or " : "", all[i].name);
        any |= all[i].takes;
    }
    return any && !all[parameters->optimizer].takes ? needed : NULL;
}

/* Why --res has no effect: not what it needs, as other results of lacking(). */
static const char sizes_of_mixture[] = "a mixture draws images of synth at the size of the output";

/* If `option` has no effect with these parameters, returns what it needs, such as "--optimizer sgd".
 * Otherwise returns NULL. */
static const char *lacking(const struct train_parameters *parameters, const char *option)
{
    const bool synth = job_generates(&parameters->job), load = loads(parameters),
               mixed = parameters->job.feed == DATA_MIXED;
    const bool pipeline = parameters->parallel == PARALLEL_PIPELINE;
    const bool undecided = parameters->parallel == PARALLEL_AUTO || parameters->chooses;
    const bool transformer = model_tables[parameters->model].layers[0].kind == LAYER_PATCHES;
    const enum schedule_kind schedule = (enum schedule_kind)parameters->schedule;
    const bool steps = schedule == SCHEDULE_STEP, multistep = schedule == SCHEDULE_MULTISTEP;
    const struct {
        bool there;
        const char *needed, *options[10];
    } needs[] = {
        {steps, "--lr-schedule step", {"lr-step", "lr-step-updates"}},
        {!parameters->lr_step_updates, "--lr-step-updates none", {"lr-step"}},
        {!parameters->lr_warmup_updates, "--lr-warmup-updates none", {"lr-warmup"}},
        {steps || multistep, "--lr-schedule step or multistep", {"lr-gamma"}},
        {multistep, "--lr-schedule multistep", {"lr-milestones"}},
        {schedule == SCHEDULE_POLYNOMIAL, "--lr-schedule polynomial", {"lr-power"}},
        {schedule_has_end(schedule),
         "--lr-schedule cosine, polynomial or tanh",
         {"lr-min", "lr-cycles", "lr-cooldown", "lr-cycle-decay", "lr-cycle-mul", "lr-k-decay",
          "lr-overlap"}},
        {parameters->lr_warmup > 0 || parameters->lr_warmup_updates > 0,
         "--lr-warmup EPOCHS or --lr-warmup-updates N",
         {"warmup-lr"}},
        {parameters->lr_cycles > 1, "--lr-cycles N", {"lr-cycle-decay", "lr-cycle-mul"}},
        {!isnan(parameters->lr_noise), "--lr-noise EPOCH", {"lr-noise-limit"}},
        {parameters->optimizer == OPTIMIZER_MUON, "--optimizer muon", {"muon-lr"}},
        {!isnan(parameters->ema), "--ema DECAY", {"ema-warmup"}},
        {parameters->loss == LOSS_BINARY, "--loss bce", {"bce-sum", "bce-threshold", "bce-pos-weight"}},
        {!parameters->raw, "samples without --raw", {"mean", "std"}},
        {parameters->std != NULL, "--std S", {"mean"}},
        {parameters->mean != NULL, "--mean M", {"std"}},
        {pipeline || undecided, "--parallel pipeline", {"stages", "microbatches", "schedule"}},
        {!pipeline, "--parallel data", {"clip-norm", "accumulate", "ema"}},
        {!pipeline || strcmp(parameters->balance, "memory") == 0, "--parallel data", {"balance"}},
        {!pipeline || parameters->replicated, "--parallel data, or more ranks than --stages", {"sync"}},
        {transformer, "a transformer, such as --model vit-tiny", {"layer-decay", "drop-path"}},
        {model_has_batch_norm(&model_tables[parameters->model]),
         "a network with batch normalisation, such as --model resnet50",
         {"sync-batch-norm", "zero-init-last-gamma"}},
        {!parameters->init, "a run without --init", {"zero-init-last-gamma"}},
        {(crops(parameters) && !mixed) || interpolates(parameters),
         mixed ? "another --feed than mixed" : "--fit random-resized-crop",
         {"interpolation"}},
        {crops(parameters), "--out-res PIXELS --fit random-resized-crop", {"crop-scale", "crop-ratio"}},
        {parameters->erasing > 0, "--erasing P", {"erase-last"}},
        {parameters->mixup > 0 || parameters->cutmix > 0, "--mixup or --cutmix", {"erase-last"}},
        {load,
         "--feed load",
         {"lanes", "shuffle", "prefetch", "resident-bytes", "resident-device-bytes", "decoder",
          "device-share"}},
        {load && !mixed, "--feed load", {"init-state", "export-state"}},
        {mixed, "--feed mixed", {"mix", "mix-epoch", "mix-labels", "mix-weights-at"}},
        {!mixed, "another --feed than mixed", {"repeats"}},
        {parameters->rand_augment != NULL, "--rand-augment POLICY", {"rand-augment-ops"}},
        {!parameters->rand_augment || !strstr(parameters->rand_augment, "-n"),
         "a policy without -n in --rand-augment",
         {"rand-augment-ops"}},
        {parameters->color.jitter, "--color-jitter B,C,S,H", {"color-jitter-p"}},
        {parameters->color.blur > 0, "--blur P", {"blur-kernel", "blur-sigma"}},
        {synth, "--data synth", {"res"}},
        {!(mixed && parameters->job.out_res), sizes_of_mixture, {"res"}},
        {parameters->job.feed == DATA_LIVE, synth ? "--feed live" : "--data synth", {"fresh", "generator"}},
        {parameters->init, "--init FILE", {"init-ema"}},
        {parameters->checkpoint, "--checkpoint DIR", {"resume", "keep", "checkpoint-steps"}},
        {parameters->log_path, "--log FILE", {"log-steps", "test-steps"}},
    };
    for (size_t i = 0; i < COUNT_OF(needs); i++)
        if (!needs[i].there && is_one_of(option, needs[i].options))
            return needs[i].needed;
    const char *optimizer = lacking_optimizer(parameters, option);
    return optimizer ? optimizer : job_lacking(&parameters->job, option);
}

/* --sync, --lr-scale, --balance and --parallel data have no effect with one rank. They are nevertheless
 * accepted, so that the same options can be measured on any number of ranks. */
/* Implements workload->applies(). */
static bool train_applies(const void *parameters, const struct variant *variant, const char *option)
{
    static const char *const of_ranks[] = {"sync",     "lr-scale",        "balance",
                                           "parallel", "sync-batch-norm", NULL};
    const struct train_parameters *given = parameters;
    if (variant && strcmp(option, "resident-device-bytes") == 0 && strcmp(variant->platform, "cuda") != 0)
        return false;
    return !lacking(parameters, option) &&
           (given->ranks > 1 || given->parallel == PARALLEL_PIPELINE || !is_one_of(option, of_ranks));
}

/* Returns whether the statistics of LAYER_BATCH_NORM depend on how the ranks divide the samples. */
static bool normalises_by_rank(const struct train_parameters *parameters)
{
    return parameters->ranks > 1 && !parameters->sync_batch_norm &&
           model_has_batch_norm(&model_tables[parameters->model]);
}

/* Returns true if the option cannot change the network's parameters at the end of an epoch, except by
 * rounding. Returns true also for options that affect only the data, because the identity contains hashes of
 * the data. */
static bool decides_nothing(const struct train_parameters *parameters, const char *option)
{
    const struct job_parameters *job = &parameters->job;
    const struct {
        const char *option;
        bool decides;
    } some[] = {
        {"feed", job->feed == DATA_CONSTANT || loads(parameters)}, /* live and stored are bit-identical */
        {"on-error", job->on_error == ON_ERROR_MASK},
        {"decoder", parameters->decoder != DECODER_AUTO}, /* resume_take_decoding(): the engine chooses */
        {"fresh", job->fresh},
        {"crop-scale", strcmp(job->crop.scale, CROP_SCALE_DEFAULT) != 0},
        {"crop-ratio", strcmp(job->crop.ratio, CROP_RATIO_DEFAULT) != 0},
        {"color-jitter", parameters->color.jitter},
        {"grayscale", parameters->color.grayscale > 0},
        {"blur", parameters->color.blur > 0},
        {"balance", normalises_by_rank(parameters)},
        {"sync-batch-norm", parameters->sync_batch_norm},
        {"zero-init-last-gamma", parameters->zero_init_last_gamma},
        {"ema-warmup", parameters->ema_warmup},
        {"bce-sum", parameters->bce_sum},
        {"draw", job->draw && strcmp(job->draw, "patches") != 0},
        {"min-lit", job->min_lit > 0}, /* the data's hashes do not cover all orbits */
        {"generator", draws_other_bits(parameters)},
        {"sync", exchange_rounds(parameters->sync)},
        {"epochs", schedule_has_end((enum schedule_kind)parameters->schedule)},
    };
    for (size_t i = 0; i < COUNT_OF(some); i++)
        if (strcmp(option, some[i].option) == 0)
            return !some[i].decides;
    /* Other ranks, shares, exchanges, pipelines and parts of a step change only the order of sums. --lr-scale
     * changes only --lr. */
    static const char *const others[] = {
        "data",        "image",        "label",       "tensor",         "labels",
        "test-labels", "test-data",    "prefetch",    "resident-bytes", "resident-device-bytes",
        "formula",     "preset",       "preset-file", "class",          "train-size",
        "test-size",   "res",          "lr-scale",    "memory-limit",   "parallel",
        "stages",      "microbatches", "schedule",    "accumulate",     "checkpoint-activations",
        NULL};
    return is_one_of(option, others);
}

/* Sets opened->identity to the options that can change the parameters, and to hashes of the initial
 * parameters and of the data. Training can resume only from a checkpoint with the same identity. The batch is
 * the global batch that is used, so training can resume on another number of ranks, unless each rank
 * normalises over its own samples. */
static enum status identify(const struct train_parameters *all, struct opened *opened)
{
    static const struct option_spec ranks = {"ranks", "N", OPTION_COUNT, .offset = AT(ranks)};
    struct option_values *identity = &opened->identity;
    option_values_free(identity);
    if (normalises_by_rank(all))
        TRY(option_values_add(identity, &ranks, all));
    for (size_t i = 0; i < COUNT_OF(options); i++)
        if (options[i].column && !decides_nothing(all, options[i].name) && !lacking(all, options[i].name))
            TRY(option_values_add(identity, &options[i], all));
    if (*opened->init)
        TRY(option_values_add_hash(identity, "init", opened->init_hash));
    if (all->begin_path)
        TRY(option_values_add_hash(identity, "init-state",
                                   checksum_seeded(&opened->begin, sizeof opened->begin, 0)));
    if (all->job.feed == DATA_MIXED && all->job.mix.share)
        TRY(option_values_add(identity, &resume_share_option, &all->job.mix));
    TRY(option_values_add_hash(identity, "train-samples", opened->data.hashes[DATA_TRAIN]));
    return option_values_add_hash(identity, "test-samples", opened->data.hashes[DATA_TEST]);
}

/* ---- Checks of the options alone ---- */

/* Rejects a name whose ending is not .safetensors. A name without an ending is allowed. */
static enum status check_ending(const char *option, const char *path)
{
    static const char ours[] = ".safetensors";
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path, *dot = strrchr(name, '.');
    return !dot || dot == name || strcmp(dot, ours) == 0
               ? STATUS_OK
               : status_option(STATUS_USAGE, option,
                               " %.200s: the file has the format safetensors; name it %.*s%s, and convert "
                               "it if a program needs another format",
                               path, (int)(dot - path < 200 ? dot - path : 200), path, ours);
}

/* Rejects output files that cannot be written. Only rank 0 writes files. */
static enum status check_outputs(const struct options *given, const struct train_parameters *parameters,
                                 const struct partition *partition)
{
    static const char *const names[] = {"export", "export-step", "export-data"};
    const char *const paths[] = {parameters->export_path, parameters->step_path, parameters->data_path};
    for (size_t i = 0; i < COUNT_OF(paths); i++)
        if (paths[i])
            TRY(check_ending(names[i], paths[i]));
    if (parameters->step_path && partition->ranks > 1)
        return status_set(STATUS_USAGE, "--export-step writes the samples of one rank; start without mpirun");
    for (size_t i = 0; partition->rank == 0 && i < COUNT_OF(paths); i++)
        if (paths[i])
            TRY(safetensors_check(paths[i]));
    if (parameters->save_batch && parameters->begin_path)
        return status_set(STATUS_USAGE,
                          "--save-batch writes samples of the first step of epoch 1, but "
                          "--init-state begins later; use --export-step, or drop one of the two");
    if (parameters->checkpoint && parameters->begin_path && parameters->state_path &&
        strcmp(parameters->begin_path, parameters->state_path) == 0)
        return status_option(STATUS_USAGE, "export-state",
                             " would replace the file of --init-state, which --resume compares; give it "
                             "another name");
    if (parameters->state_path && partition->rank == 0)
        TRY(status_prefix(stream_state_writable(parameters->state_path), "--export-state"));
    if (parameters->save_batch && partition->rank == 0)
        TRY(export_batch_check(parameters->save_batch));
    if (parameters->log_path && partition->rank == 0)
        TRY(step_log_check(parameters->log_path));
    return parameters->checkpoint && partition->rank == 0
               ? checkpoint_check_folder(parameters->checkpoint, !options_flag(given, "dry-run"))
               : STATUS_OK;
}

/* With --batch max, rejects options that need a known batch. */
static enum status check_largest(const struct train_parameters *parameters)
{
    const char *option = parameters->chooses       ? "parallel"
                         : parameters->repeats > 1 ? "repeats"
                         : parameters->save_batch  ? "save-batch"
                         : parameters->begin_path  ? "init-state"
                         : parameters->state_path  ? "export-state"
                                                   : NULL;
    if (option)
        return status_option(STATUS_USAGE, option, " needs a known batch; give --batch a number");
    return parameters->data_path ? status_set(STATUS_USAGE, "--export-data writes its file before --batch "
                                                            "max chooses a batch; give --batch a number")
                                 : STATUS_OK;
}

/* Rejects options that compute images on the host, if these images would differ from the generator's. */
static enum status check_drawn(const struct options *given, const struct train_parameters *parameters)
{
    static const char *const computed[] = {"verify", "export-step", "save-batch"};
    for (size_t i = 0; draws_other_bits(parameters) && i < COUNT_OF(computed); i++)
        if (options_given(given, computed[i]))
            return status_option(STATUS_USAGE, computed[i],
                                 ": images of --generator %s differ from those of the reference; use "
                                 "--generator fused or omp, or drop --%s",
                                 generators[parameters->generator], computed[i]);
    return STATUS_OK;
}

/* Rejects values of --on-error, --test-share and --data that the other options of the samples exclude. */
static enum status check_samples(const struct options *given, const struct train_parameters *parameters)
{
    const struct job_parameters *job = &parameters->job;
    if (loads(parameters) && job->on_error == ON_ERROR_SKIP)
        return dataset_refuse_skip("--feed load");
    if (!loads(parameters) && job->on_error == ON_ERROR_MASK)
        return status_set(STATUS_USAGE,
                          "--on-error mask is for --feed load; use --on-error skip, which omits "
                          "broken samples");
    if (job->test_data && options_given(given, "test-share"))
        return status_set(STATUS_USAGE,
                          "--test-data is the test set, so --test-share holds out nothing; drop one of them");
    return STATUS_OK;
}

/* Checks the options of --feed mixed. */
static enum status check_mix(const struct options *given, const struct train_parameters *parameters)
{
    const struct job_parameters *job = &parameters->job;
    struct data_mix mix = {.count = 0};
    if (job->feed != DATA_MIXED)
        return STATUS_OK;
    if (!job->mix.mix)
        return status_value(STATUS_USAGE, "feed", "mixed", " needs --mix, such as --mix load:0.3,synth:0.7");
    enum status status = data_mix_parse(&job->mix, &mix);
    if (status == STATUS_OK && data_mix_find(&mix, "load") == MIXTURE_SOURCES && options_given(given, "data"))
        status = status_option(STATUS_USAGE, "data",
                               ": --mix does not name it; add load:WEIGHT to --mix, or drop --data");
    data_mix_free(&mix);
    return status;
}

/* Rejects decoders and shares of a device that the other options exclude. */
static enum status check_decoder(const struct train_parameters *parameters)
{
    const bool on_device = parameters->decoder == DECODER_HARDWARE || parameters->decoder == DECODER_HYBRID;
    if (parameters->decoder == DECODER_CPU && parameters->device_share > 0)
        return status_number(STATUS_USAGE, "device-share", parameters->device_share,
                             " leaves samples to a GPU, but --decoder cpu decodes all of them; drop one of "
                             "the two");
    if (parameters->job.out_res || !(on_device || parameters->device_share > 0))
        return STATUS_OK;
    return status_option(STATUS_USAGE, on_device ? "decoder" : "device-share",
                         " needs images of one size; add --out-res PIXELS, or drop --%s",
                         on_device ? "decoder" : "device-share");
}

/* Rejects more than one way to clip gradients. */
static enum status check_clip(const struct train_parameters *parameters)
{
    static const char *const names[] = {"clip-norm", "clip-value", "clip-adaptive"};
    const double values[] = {parameters->clip_norm, parameters->clip_value, parameters->clip_adaptive};
    const char *first = NULL;
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        if (first && !isnan(values[i]))
            return status_option(STATUS_USAGE, names[i],
                                 ": gradients are clipped in one way, and --%s is given; drop one of the two",
                                 first);
        first = isnan(values[i]) ? first : names[i];
    }
    return STATUS_OK;
}

/* Rejects options that have no effect with the other options, and wrong values of --mean and --std. */
static enum status check_given(const struct options *given, const struct train_parameters *parameters)
{
    static const char *const normalising[] = {"mean", "std"};
    for (size_t i = 0; parameters->raw && i < COUNT_OF(normalising); i++)
        if (options_given(given, normalising[i]))
            return status_option(STATUS_USAGE, normalising[i],
                                 " normalises samples, but --raw leaves them as they are; drop one of them");
    for (size_t i = 0; i < COUNT_OF(options); i++) {
        const char *option = options[i].name, *needed = lacking(parameters, option);
        if (!needed || !options_given(given, option))
            continue;
        return needed == sizes_of_mixture
                   ? status_option(STATUS_USAGE, option, " contradicts --out-res: %s; drop --%s", needed,
                                   option)
                   : status_option(STATUS_USAGE, option, " needs %s; add that, or drop --%s", needed, option);
    }
    if (options_given(given, "verify-steps") && !options_given(given, "verify"))
        return status_set(STATUS_USAGE, "--verify-steps needs --verify; add that, or drop --verify-steps");
    TRY(check_drawn(given, parameters));
    TRY(check_samples(given, parameters));
    TRY(check_mix(given, parameters));
    TRY(check_decoder(parameters));
    TRY(check_clip(parameters));
    double mean[DATA_CHANNELS_MAX], std[DATA_CHANNELS_MAX];
    if (has_mean(parameters))
        TRY(job_read_mean(parameters->mean, parameters->std,
                          parameters->job.out_res ? (uint32_t)parameters->job.channels : 0, mean, std));
    if (parameters->rand_augment)
        TRY(rand_augment_parse("--rand-augment", parameters->rand_augment, &(struct rand_augment){0}));
    return parameters->largest ? check_largest(parameters) : STATUS_OK;
}

/* Returns the number at the start of `text`, and sets `*end` to the text after it. Returns 0 if there is no
 * number from 1 to UINT32_MAX. */
static uint32_t read_number(const char *text, const char **end)
{
    char *after = NULL;
    errno = 0;
    const uint64_t number = isdigit((unsigned char)*text) ? strtoull(text, &after, 10) : 0;
    *end = after;
    return errno || number > UINT32_MAX ? 0 : (uint32_t)number;
}

/* Reads --lr-milestones: ascending epochs, joined by ':'. An epoch has `steps` steps. */
static enum status read_milestones(const struct train_parameters *all, uint64_t steps,
                                   struct schedule *schedule)
{
    const char *text = all->lr_milestones;
    if (all->schedule != SCHEDULE_MULTISTEP)
        return STATUS_OK;
    if (!text)
        return status_value(STATUS_USAGE, "lr-schedule", "multistep", " needs --lr-milestones E1:E2:...");
    for (uint32_t last = 0; schedule->milestone_count < SCHEDULE_MILESTONES_MAX;) {
        const char *end;
        const uint32_t epoch = read_number(text, &end);
        if (epoch <= last || (*end && *end != ':'))
            break;
        schedule->milestones[schedule->milestone_count++] = epoch * steps;
        if (!*end)
            return STATUS_OK;
        last = epoch;
        text = end + 1;
    }
    return status_set(
        STATUS_USAGE,
        "--lr-milestones %.80s: give at most %d ascending epochs from 1 on, joined by ':', as in 30:60:80",
        all->lr_milestones, SCHEDULE_MILESTONES_MAX);
}

/* Rejects a batch that leaves a rank, or a part of a rank's step, without samples. */
static enum status check_batch(const struct train_parameters *all, const struct partition *partition)
{
    if (all->job.batch < partition->ranks)
        return status_number(STATUS_USAGE, "batch", (double)all->job.batch,
                             " has too few samples for %" PRIu64
                             " ranks; raise --batch, or start fewer ranks",
                             partition->ranks);
    if (all->accumulate > all->job.batch / partition->ranks)
        return status_number(STATUS_USAGE, "accumulate", (double)all->accumulate,
                             " is more than the %" PRIu64
                             " samples of a rank's step; lower --accumulate, or raise --batch",
                             all->job.batch / partition->ranks);
    return STATUS_OK;
}

/* Returns the number of stages of a pipeline. */
static uint64_t stages_of(const struct train_parameters *all, const struct partition *partition)
{
    return all->stages ? all->stages : partition->ranks;
}

/* Rejects impossible numbers of stages and micro-batches. `all` has the global batch. */
static enum status check_pipeline(const struct train_parameters *all, const struct partition *partition)
{
    if (all->parallel != PARALLEL_PIPELINE)
        return STATUS_OK;
    const uint64_t stages = stages_of(all, partition);
    if (partition->ranks % stages)
        return status_number(STATUS_USAGE, "stages", (double)all->stages,
                             ": each rank holds one stage, and there are %" PRIu64
                             " ranks; start a multiple of the number of stages, or drop --stages",
                             partition->ranks);
    if (model_has_batch_norm(&model_tables[all->model]))
        return status_value(STATUS_USAGE, "parallel", "pipeline",
                            ": %s normalises over the samples of a batch, which micro-batches would change; "
                            "use --parallel data",
                            model_tables[all->model].name);
    const uint64_t samples = all->job.batch / (partition->ranks / stages);
    if (all->micros > samples)
        return status_number(STATUS_USAGE, "microbatches", (double)all->micros,
                             " is more than the %" PRIu64
                             " samples of a step; lower --microbatches, or raise --batch",
                             samples);
    if (all->pipe_schedule == PIPE_ZB_H1 && model_tables[all->model].layers[0].kind == LAYER_PATCHES)
        return status_value(STATUS_USAGE, "schedule", pipe_schedule_names[all->pipe_schedule],
                            ": the kernels of a transformer compute the gradients of inputs and weights "
                            "together; use --schedule 1f1b");
    return STATUS_OK;
}

/* Rejects a schedule and a network that the other options exclude. `all` has the scaled learning rate. */
static enum status check_plan(const struct train_parameters *all)
{
    struct schedule unused = {0};
    TRY(read_milestones(all, 1, &unused));
    if (schedule_has_end((enum schedule_kind)all->schedule) && all->lr_min > all->lr)
        return status_number(STATUS_USAGE, "lr-min", all->lr_min,
                             " is more than the learning rate %g; lower --lr-min", all->lr);
    if (all->optimizer == OPTIMIZER_MUON && !(all->lr > 0))
        return status_number(STATUS_USAGE, "lr", all->lr,
                             ": --muon-lr follows the schedule of --lr; give a --lr of more than 0");
    return STATUS_OK;
}

/* Checks the options, and that output files can be written, before any data are read. `all` has the global
 * batch. */
static enum status check_options(const struct options *given, const struct train_parameters *parameters,
                                 const struct train_parameters *all, const struct partition *partition)
{
    struct jitter color;
    struct crop_range range;
    TRY(check_given(given, parameters));
    TRY(jitter_read(&parameters->color, &color));
    TRY(crop_read(&parameters->job.crop, &range));
    TRY(check_batch(all, partition));
    TRY(check_pipeline(all, partition));
    TRY(check_plan(all));
    return check_outputs(given, parameters, partition);
}

/* ---- Checks with the data, the network and the plan of the steps ----
 *
 * STATUS_USAGE with a remedy if the options are impossible. `all` has the global batch. */

/* If the batch is larger than the training set, makes it as large as the set, and says so. */
static enum status limit_batch(const struct options *given, struct train_parameters *all,
                               const struct partition *partition, const struct data *data)
{
    const uint64_t count = data->sets[DATA_TRAIN].count;
    const uint64_t most = count < all->repeats ? count : count - count % all->repeats;
    if (count < partition->ranks)
        return status_set(STATUS_TOO_LARGE,
                          "there are only %" PRIu64 " samples to train on, fewer than the %" PRIu64
                          " ranks; start fewer ranks, or use other data",
                          count, partition->ranks);
    if (all->job.batch > most)
        all->reduced_batch = true;
    /* With several ranks, the global batch is not the value of the option. */
    all->job.batch = job_limit_batch(all->job.batch, most, DATA_TRAIN, true,
                                     partition->ranks > 1 || options_given(given, "batch"));
    return STATUS_OK;
}

/* Rejects a --shift that reaches the width or the height of a sample, because such a shift could leave only
 * zeros. */
static enum status check_shift(const struct train_parameters *parameters, const struct shape *shape)
{
    uint32_t side = shape->height < shape->width ? shape->height : shape->width;
    return parameters->shift < side ? STATUS_OK
                                    : status_number(STATUS_USAGE, "shift", (double)parameters->shift,
                                                    ": these samples are %ux%u; give a smaller shift",
                                                    shape->height, shape->width);
}

/* Rejects augmentation of images, and networks for images, if the samples are rows of embeddings. */
static enum status check_rows(const struct train_parameters *all, const struct data *data)
{
    const struct {
        bool given;
        const char *option;
    } others[] = {{all->shift > 0, "shift"},
                  {all->flip, "flip"},
                  {all->rand_augment != NULL, "rand-augment"},
                  {all->erasing > 0, "erasing"},
                  {all->color.jitter, "color-jitter"},
                  {all->color.grayscale > 0, "grayscale"},
                  {all->color.blur > 0, "blur"},
                  {all->cutmix > 0, "cutmix"},
                  {all->repeats > 1, "repeats"}};
    for (size_t i = 0; data->rows && i < COUNT_OF(others); i++)
        if (others[i].given)
            return status_option(STATUS_USAGE, others[i].option,
                                 " augments images, but --data %s has rows of embeddings; drop --%s",
                                 all->job.data, others[i].option);
    const bool windows = all->job.lanes != STREAM_LANES;
    if (data->rows && (windows || (all->job.shuffle != STREAM_SHUFFLE && all->job.shuffle != 0)))
        return status_option(
            STATUS_USAGE, windows ? "lanes" : "shuffle",
            " is for images, but --data %s has rows of embeddings, which are all permuted in "
            "each epoch; drop it, or keep the order of the files with --shuffle 0",
            all->job.data);
    const struct model_table *table = &model_tables[all->model];
    return !data->rows || table->layers[0].kind == LAYER_LINEAR
               ? STATUS_OK
               : status_value(
                     STATUS_USAGE, "model", table->name,
                     " is for images, but --data %s has rows of embeddings; use --model logreg or mlp",
                     all->job.data);
}

/* Rejects what cannot train on multi-hot labels. */
static enum status check_multi_hot(const struct train_parameters *all, const struct data *data)
{
    if (data->multi_hot && all->loss != LOSS_BINARY)
        return status_value(
            STATUS_USAGE, "loss", losses[all->loss],
            ": the samples of --data %s have multi-hot labels, and softmax cross-entropy needs "
            "one class per sample; use --loss bce",
            all->job.data);
    return data->multi_hot && data->fresh && all->parallel == PARALLEL_PIPELINE
               ? status_set(STATUS_USAGE,
                            "--fresh: new images have new multi-hot labels in every epoch, which only the "
                            "first stage of a pipeline generates; drop --fresh, or use --parallel data")
               : STATUS_OK;
}

static enum status check_data(const struct train_parameters *all, const struct partition *partition,
                              const struct data *data)
{
    TRY(check_rows(all, data));
    TRY(check_multi_hot(all, data));
    TRY(check_batch(all, partition));
    TRY(check_pipeline(all, partition));
    return check_shift(all, &data->shape);
}

static enum status check_model(const struct train_parameters *all, const struct partition *partition,
                               const struct model *model)
{
    uint32_t most = pipe_pieces(model);
    return all->parallel != PARALLEL_PIPELINE || stages_of(all, partition) <= most
               ? STATUS_OK
               : status_value(STATUS_USAGE, "model", model->name,
                              " can be cut into at most %u stages; give --stages %u, or use another model",
                              most, most);
}

/* Warns if the run ends before the warm-up, before the first decay of --lr-schedule step, or before the last
 * of --lr-milestones. This is not an error: a later run with a larger --epochs may resume this one. */
static void warn_of_schedule(const struct train_parameters *all, const struct schedule *schedule)
{
    const uint64_t total = schedule->total_steps;
    const uint32_t milestones = schedule->milestone_count;
    const char *plural = all->epochs == 1 ? "" : "s";
    const char *option = all->lr_warmup_updates ? "lr-warmup-updates" : "lr-warmup";
    char value[32];
    snprintf(value, sizeof value, "%g",
             all->lr_warmup_updates ? (double)all->lr_warmup_updates : all->lr_warmup);
    if (schedule->warmup_steps >= total && total > 0)
        status_warn_value(option, value,
                          ": the learning rate does not reach --lr within %" PRIu64
                          " epoch%s; lower --%s, or raise --epochs",
                          all->epochs, plural, option);
    option = all->lr_step_updates ? "lr-step-updates" : "lr-step";
    snprintf(value, sizeof value, "%g", all->lr_step_updates ? (double)all->lr_step_updates : all->lr_step);
    if (schedule->kind == SCHEDULE_STEP && schedule->decay_steps >= (double)total)
        status_warn_value(option, value,
                          ": the learning rate does not decay within %" PRIu64
                          " epoch%s; lower --%s, or raise --epochs",
                          all->epochs, plural, option);
    if (schedule->kind == SCHEDULE_MULTISTEP && schedule->milestones[milestones - 1] >= total)
        status_warn_value("lr-milestones", all->lr_milestones,
                          ": the last one is not reached within %" PRIu64
                          " epoch%s; lower it, or raise --epochs",
                          all->epochs, plural);
}

/* As warn_of_schedule(), for options that also change other schedules: --lr-noise and --mix-weights-at. */
static void warn_of_late_changes(const struct train_parameters *all, const struct train *train)
{
    const uint64_t steps = all->epochs * train->schedule.epoch_steps;
    const struct data_mixture *mixture = train->data->mixture;
    const char *plural = all->epochs == 1 ? "" : "s";
    char value[32];
    snprintf(value, sizeof value, "%g", all->lr_noise);
    if (train->schedule.noise_limit > 0 && train->schedule.noise_step >= steps)
        status_warn_value("lr-noise", value,
                          ": there is no noise within %" PRIu64
                          " epoch%s; lower --lr-noise, or raise --epochs",
                          all->epochs, plural);
    if (mixture && mixture->mix.phase_count > 1 &&
        mixture->mix.phases[mixture->mix.phase_count - 1].step >= steps)
        status_warn_value("mix-weights-at", all->job.mix.weights_at,
                          ": the last weights are not reached within the %" PRIu64 " steps of %" PRIu64
                          " epoch%s; lower the step, or raise --epochs",
                          steps, all->epochs, plural);
}

/* Rejects schedules that leave no steps for the decay, or that would raise the rate. */
static enum status check_schedule(const struct train_parameters *all, const struct train *train)
{
    const struct schedule *schedule = &train->schedule;
    if (train->rank == 0)
        warn_of_late_changes(all, train);
    if (!schedule_has_end(schedule->kind)) {
        if (train->rank == 0)
            warn_of_schedule(all, schedule);
        return STATUS_OK;
    }
    if (schedule->warmup_steps >= schedule->total_steps && !isnan(all->lr_cooldown))
        return status_number(STATUS_USAGE, "lr-cooldown", all->lr_cooldown,
                             " leaves none of the %" PRIu64
                             " epochs for the decay; lower --lr-cooldown or --lr-warmup",
                             all->epochs);
    if (schedule->warmup_steps >= schedule->total_steps) {
        const bool updates = all->lr_warmup_updates > 0;
        const char *option = updates ? "lr-warmup-updates" : "lr-warmup";
        return status_number(STATUS_USAGE, option, updates ? (double)all->lr_warmup_updates : all->lr_warmup,
                             " leaves none of the %" PRIu64 " epochs for the decay; lower --%s", all->epochs,
                             option);
    }
    if (schedule->cycles > schedule->total_steps - schedule->warmup_steps)
        return status_number(STATUS_USAGE, "lr-cycles", (double)all->lr_cycles,
                             ": there are only %" PRIu64 " steps after the warm-up; lower --lr-cycles",
                             schedule->total_steps - schedule->warmup_steps);
    if (schedule_first_cycle(schedule, schedule->total_steps - schedule->warmup_steps) < 1)
        return status_number(STATUS_USAGE, "lr-cycle-mul", all->lr_cycle_mul,
                             ": the first of %" PRIu64
                             " cycles would have less than one step; lower --lr-cycle-mul or --lr-cycles",
                             all->lr_cycles);
    return STATUS_OK;
}

/* Rejects a --bce-threshold with which all targets are equal, whatever samples --mixup and --cutmix mix. */
static enum status check_threshold(const struct train_parameters *all, const struct data *data)
{
    const double least = all->label_smoothing / data->classes, most = 1 - all->label_smoothing + least;
    if (isnan(all->bce_threshold) || data->classes < 2 ||
        (all->bce_threshold >= least && all->bce_threshold < most))
        return STATUS_OK;
    return status_number(STATUS_USAGE, "bce-threshold", all->bce_threshold,
                         " would make all targets equal, because they are from %g to %g; give a number "
                         "between them, or drop --bce-threshold",
                         least, most);
}

/* Rejects augmentation that is impossible with these samples. */
static enum status check_augment(const struct train_parameters *all, const struct train *train)
{
    struct augment_plan plan;
    const uint64_t count = train->data->sets[DATA_TRAIN].count;
    if (all->repeats > count)
        return status_number(STATUS_USAGE, "repeats", (double)all->repeats,
                             " is more than the %" PRIu64 " training samples; lower --repeats", count);
    if (all->job.batch % all->repeats != 0)
        return status_number(STATUS_USAGE, "repeats", (double)all->repeats,
                             " does not divide the %" PRIu64
                             " samples of a step; give a --batch that is a multiple of it",
                             all->job.batch);
    if (count * all->repeats > UINT32_MAX)
        return status_number(
            STATUS_USAGE, "repeats", (double)all->repeats,
            ": %" PRIu64
            " copies of the training samples are more than 2^32 - 1; lower --repeats or --train-size",
            count * all->repeats);
    return augment_computes(&train->augment) ? augment_plan(train, &plan) : STATUS_OK;
}

static enum status check_steps(const struct train_parameters *all, const struct train *train)
{
    TRY(check_schedule(all, train));
    TRY(check_threshold(all, train->data));
    return check_augment(all, train);
}

/* Reads the state of --init-state. */
static enum status read_state(const char *path, struct stream_state *state)
{
    return path ? status_prefix(stream_state_read(path, state), "--init-state") : STATUS_OK;
}

/* ---- Whether a variant supports the options ---- */

/* Sets the filter and the fill of timm's operations: the mean of the normalisation as bytes, as timm's
 * transforms pass it on, else timm's default of 128. */
static void fill_policy(const struct train_parameters *parameters, const struct shape *shape,
                        struct augment_policy *policy)
{
    double mean[DATA_CHANNELS_MAX], std[DATA_CHANNELS_MAX];
    if (policy->kind != AUGMENT_TIMM)
        return;
    const bool known = has_mean(parameters) && job_read_mean(parameters->mean, parameters->std,
                                                             shape->channels, mean, std) == STATUS_OK;
    for (uint32_t c = 0; c < COUNT_OF(policy->fill); c++) {
        const double fill = known ? rint(255 * mean[shape->channels == 1 ? 0 : c]) : 128;
        policy->fill[c] = (uint8_t)(fill < 0 ? 0 : fill > 255 ? 255 : fill);
    }
    policy->bicubic = parameters->job.filter == RESAMPLE_BICUBIC;
    policy->random_filter = parameters->job.filter == RESAMPLE_RANDOM;
}

static struct augment chosen_augment(const struct train_parameters *parameters, const struct shape *shape)
{
    struct rand_augment rand = {(uint32_t)parameters->rand_augment_ops, 0, {0}};
    const bool changes = parameters->rand_augment &&
                         rand_augment_parse("--rand-augment", parameters->rand_augment, &rand) == STATUS_OK;
    fill_policy(parameters, shape, &rand.policy);
    struct jitter color;
    struct crop_range range;
    (void)crop_read(&parameters->job.crop, &range);
    (void)jitter_read(&parameters->color, &color); /* succeeds: check_options() has called it */
    return (struct augment){.shift = (uint32_t)parameters->shift,
                            .flip = parameters->flip,
                            .crop = crops(parameters) && !loads(parameters),
                            .bicubic = parameters->job.filter == RESAMPLE_BICUBIC,
                            .random_filter = parameters->job.filter == RESAMPLE_RANDOM,
                            .operations = changes ? rand.operations : 0,
                            .magnitude = changes ? rand.magnitude : 0,
                            .policy = rand.policy,
                            .erase_last = parameters->erase_last,
                            .repeats = (uint32_t)parameters->repeats,
                            .erasing = (float)parameters->erasing,
                            .height = shape->height,
                            .width = shape->width,
                            .color = color,
                            .range = range};
}

/* Returns --feed, or what it is if it is not given. */
static enum data_feed chosen_feed(const struct train_parameters *parameters)
{
    if (parameters->job.given)
        return DATA_LOAD;
    if (parameters->job.feed >= 0)
        return (enum data_feed)parameters->job.feed;
    return strcmp(parameters->job.data, "synth") == 0 ? DATA_LIVE : DATA_STORED;
}

/* Rejects generators for GPUs in engines that run on a CPU. */
static enum status check_generator(const struct train_parameters *parameters, const struct variant *variant)
{
    const char *name = generators[parameters->generator];
    const bool for_cpu = parameters->generator == GENERATOR_AUTO || strcmp(name, "omp") == 0;
    return for_cpu || strcmp(variant->platform, "cuda") == 0
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "it runs on a CPU, and --generator %s generates images on a GPU; use "
                            "--generator omp or auto",
                            name);
}

/* Rejects decoders on a GPU in engines that run on a CPU. */
static enum status check_decoding(const struct train_parameters *parameters, const struct variant *variant)
{
    if (!loads(parameters) || strcmp(variant->platform, "cuda") == 0)
        return STATUS_OK;
    if (parameters->decoder == DECODER_HARDWARE || parameters->decoder == DECODER_HYBRID)
        return status_set(STATUS_USAGE,
                          "it runs on a CPU, and --decoder %s decodes on a GPU; use --decoder cpu or auto",
                          decoder_names[parameters->decoder]);
    return !isnan(parameters->device_share) && parameters->device_share > 0
               ? status_set(STATUS_USAGE, "it runs on a CPU, which decodes all samples; drop --device-share")
               : STATUS_OK;
}

/* Rejects augmentation that the engine does not support. */
static enum status check_augments(const struct train_parameters *parameters, const struct engine *engine)
{
    const struct augment augment = chosen_augment(parameters, &(struct shape){0});
    const bool simple = !augment_computes(&augment) && augment.erasing <= 0;
    const bool crops = augment.crop && strcmp(parameters->job.data, "synth") != 0;
    return simple || engine->augments
               ? STATUS_OK
               : status_set(
                     STATUS_USAGE,
                     "it augments samples only by --shift and --flip; drop --fit "
                     "random-resized-crop, --rand-augment, --color-jitter, --grayscale, --blur, "
                     "--erasing and --repeats, or use train-cuda, train-vit, train-omp or train-naive%s",
                     crops ? "; with --feed load, images are cropped for every variant" : "");
}

static enum status train_suits(const struct options *given, const void *parameters_,
                               const struct variant *variant)
{
    const struct train_parameters *parameters = parameters_;
    const struct engine *engine = variant->traits;
    const enum data_feed feed = chosen_feed(parameters);
    if (parameters->checkpoint_activations && !engine->recomputes)
        return status_set(STATUS_USAGE,
                          "--checkpoint-activations works only with train-vit and train-vit-amp; drop it");
    TRY(check_generator(parameters, variant));
    TRY(check_decoding(parameters, variant));
    static const char *const scaling[] = {"loss-scale", "loss-scale-growth", "loss-scale-backoff",
                                          "loss-scale-interval"};
    for (size_t i = 0; !engine->scales_loss && i < COUNT_OF(scaling); i++)
        if (options_given(given, scaling[i]))
            return status_set(STATUS_USAGE,
                              "--%s works only with train-amp, train-vit-amp and train-resnet-amp; drop it",
                              scaling[i]);
    if (parameters->cudnn_benchmark && !engine->benchmarks)
        return status_set(STATUS_USAGE,
                          "--cudnn-benchmark works only with train-cudnn and train-cudnn-tf32; drop it");
    TRY(check_augments(parameters, engine));
    return engine->feeds || feed == DATA_STORED || (engine->loads && feed == DATA_LOAD)
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "it supports only --feed stored%s; change --feed, or use train-cuda",
                            engine->loads ? " and load" : "");
}

/* Refuses what would change the batches over which LAYER_BATCH_NORM normalises, or cannot be verified. */
static enum status check_batch_norm(const struct opened *opened)
{
    const struct train *train = &opened->job.train;
    if (!train->model->normalises)
        return STATUS_OK;
    if (train->accumulate > 1)
        return status_option(
            STATUS_USAGE, "accumulate",
            ": %s normalises over the samples of a batch, which parts of a batch would change; "
            "lower --batch instead",
            train->model->name);
    if (train->sync_batch_norm && train->ranks > 1 && exchange_changes(opened->job.sync))
        return status_value(STATUS_USAGE, "sync", exchange_names[opened->job.sync],
                            ": it rounds or updates what it adds up, but --sync-batch-norm needs exact sums; "
                            "use --sync auto, nccl or peer");
    return STATUS_OK;
}

static enum status train_accepts(const void *input, const struct variant *variant)
{
    const struct opened *opened = input;
    const struct train *train = &opened->job.train;
    const struct engine *engine = variant->traits;
    if (engine->accepts)
        TRY(engine->accepts(train));
    TRY(layer_precision_accepts(engine, train->model));
    TRY(check_batch_norm(opened));
    if (opened->job.pipeline.stages)
        TRY(pipeline_accepts(engine));
    else if (train->ranks > 1)
        TRY(exchange_probe(opened->job.sync, engine, &train->optimizer));
    if (train->ranks > 1 && opened->job.balance == BALANCE_MEASURED &&
        engine->gradients_in == GRADIENTS_IN_GRAPH)
        return status_set(STATUS_USAGE,
                          "its CUDA graph contains the shares and the exchange, so it can neither "
                          "measure speeds nor change shares; use --balance equal, memory or a "
                          "list such as 3:1, or use train-bf16");
    return STATUS_OK;
}

static void train_close(void *input)
{
    struct opened *opened = input;
    data_close(&opened->data);
    option_values_free(&opened->identity);
    option_values_free(&opened->samples);
    free(opened->initial);
    free(opened->weights);
    free(opened->shares);
    free(opened->memory_limits);
    free(opened);
}

/* ---- The job of the trainer ---- */

/* Returns the value of an option that may be missing. */
static double or_zero(double value)
{
    return isnan(value) ? 0 : value;
}

static struct optimizer chosen_optimizer(const struct train_parameters *parameters)
{
    return (struct optimizer){
        .kind = (enum optimizer_kind)parameters->optimizer,
        .momentum = parameters->momentum,
        .beta1 = parameters->beta1,
        .beta2 = parameters->beta2,
        .epsilon = parameters->epsilon,
        .weight_decay = parameters->weight_decay,
        .clip_norm = or_zero(parameters->clip_norm),
        .average = or_zero(parameters->ema),
        .layer_decay = parameters->layer_decay,
        .clip_value = or_zero(parameters->clip_value),
        .clip_adaptive = or_zero(parameters->clip_adaptive),
        .matrix_rate = parameters->optimizer == OPTIMIZER_MUON ? parameters->muon_lr / parameters->lr : 0,
        .average_warms = parameters->ema_warmup};
}

/* `steps` is the number of steps of an epoch. */
static struct schedule chosen_schedule(const struct train_parameters *parameters, uint64_t steps)
{
    const double decayed = fmax((double)parameters->epochs - or_zero(parameters->lr_cooldown), 0);
    return (struct schedule){.kind = (enum schedule_kind)parameters->schedule,
                             .rate = parameters->lr,
                             .warmup_steps = parameters->lr_warmup_updates
                                                 ? parameters->lr_warmup_updates
                                                 : (uint64_t)llround(parameters->lr_warmup * (double)steps),
                             .total_steps = (uint64_t)llround(decayed * (double)steps),
                             .decay_steps = parameters->lr_step_updates ? (double)parameters->lr_step_updates
                                                                        : parameters->lr_step * (double)steps,
                             .overlaps = parameters->lr_overlap,
                             .warmup_begins = !isnan(parameters->warmup_lr),
                             .warmup_rate = or_zero(parameters->warmup_lr),
                             .cycle_decay = or_zero(parameters->lr_cycle_decay),
                             .cycle_mul = or_zero(parameters->lr_cycle_mul),
                             .k_decay = or_zero(parameters->lr_k_decay),
                             .noise_limit = isnan(parameters->lr_noise) ? 0 : parameters->lr_noise_limit,
                             .noise_step = (uint64_t)llround(or_zero(parameters->lr_noise) * (double)steps),
                             .epoch_steps = steps,
                             .seed = parameters->seed,
                             .gamma = parameters->lr_gamma,
                             .least = parameters->lr_min,
                             .power = parameters->lr_power,
                             .cycles = (uint32_t)parameters->lr_cycles};
}

/* Sets opened->job.train, except for the milestones of its schedule. */
static enum status fill_train(const struct train_parameters *parameters, const struct partition *partition,
                              struct opened *opened)
{
    struct train *train = &opened->job.train;
    *train = (struct train){.model = &opened->model,
                            .data = &opened->data,
                            .seed = parameters->seed,
                            .batch = (uint32_t)parameters->job.batch,
                            .drop_last = parameters->drop_last,
                            .rank = (uint32_t)partition->rank,
                            .ranks = (uint32_t)partition->ranks,
                            .augment = chosen_augment(parameters, &opened->data.shape),
                            .optimizer = chosen_optimizer(parameters),
                            .loss = (enum loss_kind)parameters->loss,
                            .smoothing = (float)parameters->label_smoothing,
                            .binary = {.sums = parameters->bce_sum,
                                       .thresholds = !isnan(parameters->bce_threshold),
                                       .threshold = (float)or_zero(parameters->bce_threshold),
                                       .positive_extra = isnan(parameters->bce_pos_weight)
                                                             ? 0
                                                             : (float)(parameters->bce_pos_weight - 1)},
                            .scaling = {.begin = (float)or_zero(parameters->loss_scale),
                                        .growth = (float)or_zero(parameters->loss_scale_growth),
                                        .backoff = (float)or_zero(parameters->loss_scale_backoff),
                                        .steps = (uint32_t)parameters->loss_scale_interval},
                            .mixing = {parameters->mixup, parameters->cutmix},
                            .accumulate = (uint32_t)parameters->accumulate,
                            .checkpoint_activations = parameters->checkpoint_activations,
                            .sync_batch_norm = parameters->sync_batch_norm,
                            .cudnn_benchmark = parameters->cudnn_benchmark,
                            .memory_limit_bytes = opened->memory_limits};
    if (parameters->generator != GENERATOR_AUTO)
        train->generator = generators[parameters->generator];
    if (opened->data.feed == DATA_LOAD) {
        opened->decoding =
            (struct train_decoding){(enum decoder)parameters->decoder,
                                    isnan(parameters->device_share) ? -1 : parameters->device_share};
        train->decoding = &opened->decoding;
    }
    train->schedule = chosen_schedule(parameters, train_steps(train));
    return !opened->data.mixture
               ? STATUS_OK
               : data_mixture_plan(&opened->data, train->seed, train->batch, train->drop_last);
}

/* Sets the members of opened->job other than `train`. */
static void fill_job(const struct train_parameters *parameters, const struct partition *partition,
                     struct opened *opened)
{
    struct train_job *job = &opened->job;
    job->initial = opened->initial;
    job->epochs = (uint32_t)parameters->epochs;
    job->verify_steps = (uint32_t)parameters->verify_steps;
    job->checkpoints = parameters->checkpoint;
    job->keep = (uint32_t)parameters->keep;
    job->checkpoint_steps = parameters->checkpoint ? (uint32_t)parameters->checkpoint_steps : 0;
    job->log_path = parameters->log_path;
    job->log_steps = parameters->log_path ? (uint32_t)parameters->log_steps : 0;
    job->test_steps = (uint32_t)parameters->test_steps;
    job->resume = parameters->resume;
    job->largest = parameters->largest;
    job->allow_nan = parameters->allow_nan;
    job->shows_memory = parameters->memory;
    job->tries = false;
    job->sync = parameters->sync;
    job->pipeline = (struct pipeline_plan){0};
    if (parameters->parallel == PARALLEL_PIPELINE)
        job->pipeline = (struct pipeline_plan){.schedule = (enum pipe_schedule)parameters->pipe_schedule,
                                               .stages = (uint32_t)stages_of(parameters, partition),
                                               .micros = (uint32_t)parameters->micros,
                                               .sync = parameters->sync};
    job->identity = opened->identity;
    job->data = parameters->job.data;
    job->samples = opened->samples;
    job->export_path = parameters->export_path;
    job->step_path = parameters->step_path;
    job->begin = parameters->begin_path ? &opened->begin : NULL;
    job->begin_path = parameters->begin_path;
    job->state_path = parameters->state_path;
    job->skipped = &opened->skipped;
}

/* Reads --memory-limit. */
static enum status read_limits(const struct train_parameters *parameters, const struct partition *partition,
                               struct opened *opened)
{
    if (!parameters->memory_limit)
        return STATUS_OK;
    opened->memory_limits = malloc(partition->ranks * sizeof *opened->memory_limits);
    TRY(ALLOCATED(opened->memory_limits, "out of memory for --memory-limit"));
    return memory_limit_parse(parameters->memory_limit, (uint32_t)partition->ranks, opened->memory_limits);
}

/* Reads --balance, and allocates the shares of the ranks. */
static enum status read_balance(const struct train_parameters *parameters, const struct partition *partition,
                                struct opened *opened)
{
    uint32_t ranks = (uint32_t)partition->ranks;
    opened->weights = malloc(ranks * sizeof *opened->weights);
    opened->shares = malloc(ranks * sizeof *opened->shares);
    TRY(ALLOCATED(opened->weights && opened->shares, "out of memory for the shares"));
    return balance_parse(parameters->balance, ranks, &opened->job.balance, opened->weights);
}

/* Sets the shares that the ranks have until trainers change them. */
static void fill_shares(struct opened *opened)
{
    struct train_job *job = &opened->job;
    bool any = job->balance == BALANCE_MEASURED || job->balance == BALANCE_MEMORY;
    job->weights = NULL; /* an earlier plan may have set them */
    job->shares = NULL;
    if (job->train.ranks <= 1 || job->pipeline.stages)
        return;
    job->weights = opened->weights;
    job->shares = opened->shares;
    partition_divide(job->weights, job->train.ranks, job->train.batch, 0, job->shares);
    job->train.shares = job->balance == BALANCE_EQUAL ? NULL : job->shares;
    job->train.share_max = train_room(&job->train, any);
}

/* Sets opened->job. */
static enum status plan(const struct train_parameters *all, const struct partition *partition,
                        struct opened *opened)
{
    TRY(identify(all, opened));
    TRY(fill_train(all, partition, opened));
    fill_job(all, partition, opened);
    fill_shares(opened);
    return read_milestones(all, train_steps(&opened->job.train), &opened->job.train.schedule);
}

/* Returns the parameters of the whole training run: the batch is the global batch, and the learning rate is
 * scaled. */
static struct train_parameters of_all_ranks(const struct train_parameters *parameters,
                                            const struct partition *partition)
{
    struct train_parameters all = *parameters;
    all.job.batch = partition_share(partition, parameters->job.batch).total;
    double factor = (double)all.job.batch / (double)parameters->job.batch;
    factor = parameters->lr_scale == LR_SCALE_LINEAR ? factor
             : parameters->lr_scale == LR_SCALE_SQRT ? sqrt(factor)
                                                     : 1;
    all.lr *= factor;
    all.muon_lr *= factor;
    return all;
}

enum status train_replan(const struct options *given, const struct train_parameters *parameters,
                         const struct partition *partition, struct opened *opened)
{
    struct train_parameters all = of_all_ranks(parameters, partition), undecided = *parameters;
    all.job.batch = opened->job.train.batch;
    undecided.chooses = true; /* options of a pipeline do not exclude the other ways */
    TRY(check_given(given, &undecided));
    TRY(check_pipeline(&all, partition));
    TRY(check_multi_hot(&all, &opened->data));
    TRY(check_plan(&all));
    TRY(check_model(&all, partition, &opened->model));
    return plan(&all, partition, opened);
}

/* ---- Opening ---- */

/* Computes the initial parameters. */
static enum status begin(const struct train_parameters *parameters, struct opened *opened)
{
    opened->initial = malloc(opened->model.arena_values * sizeof *opened->initial);
    TRY(ALLOCATED(opened->initial, "out of memory for the parameters"));
    model_initialise(&opened->model, parameters->seed, opened->initial);
    if (parameters->init) {
        const struct init_request from = {"--init", parameters->init, (enum init_ema)parameters->init_ema};
        TRY(init_take(&from, &opened->model, opened->initial, &opened->init_hash));
        snprintf(opened->init, sizeof opened->init, "%016" PRIx64, opened->init_hash);
    }
    if (parameters->zero_init_last_gamma)
        model_zero_last_gamma(&opened->model, opened->initial);
    model_initialise_head(&opened->model, parameters->head_init_scale, parameters->head_init_bias,
                          opened->initial);
    return STATUS_OK;
}

/* Sets the normalisation of the samples. */
static enum status normalise(const struct train_parameters *all, struct data *data)
{
    double mean[DATA_CHANNELS_MAX], std[DATA_CHANNELS_MAX];
    data_normalise(data, !all->raw && !data->given); /* the samples are not known yet */
    if (!has_mean(all))
        return STATUS_OK;
    TRY(job_read_mean(all->mean, all->std, data->shape.channels, mean, std));
    data_normalise_by(data, mean, std);
    return STATUS_OK;
}

/* Warns about options of a recipe that a mixture does not follow. */
static void warn_of_mixture(const struct train_parameters *all)
{
    if (all->recipe > 0 && crops(all) && all->job.filter != RESAMPLE_BILINEAR)
        status_warn_value("recipe", recipe_names[all->recipe],
                          ": a mixture resizes crops by the bilinear filter, and has no copies of samples");
}

/* Opens the data, the model and the initial parameters of the whole training run. Limits its batch to the
 * training set. */
static enum status open_all(const struct options *given, struct train_parameters *all,
                            const struct partition *partition, struct opened *opened)
{
    struct job_parameters job = all->job;
    if (all->largest) /* --feed constant holds one batch in memory; its size is not known yet, so hold all
                         samples */
        job.batch = UINT32_MAX;
    if (partition->rank == 0 && options_given(given, "data") && data_is_generated(job.data) &&
        access(job.data, F_OK) == 0)
        status_warn_value("data", job.data,
                          " names generated data; for the folder of this name, give --data ./%s", job.data);
    TRY(job_open_data(&job, &opened->data));
    if (!opened->data.mixture && !opened->data.given)
        data_warn_of_classes(&opened->data, job.data, !job.classes && !job.train_size && !job.test_size);
    else if (opened->data.mixture && partition->rank == 0)
        warn_of_mixture(all);
    TRY(limit_batch(given, all, partition, &opened->data));
    TRY(check_data(all, partition, &opened->data));
    TRY(normalise(all, &opened->data));
    TRY(model_build(&model_tables[all->model], opened->data.shape, opened->data.classes, &opened->model));
    TRY(check_model(all, partition, &opened->model));
    if (!isnan(all->drop_path) && opened->model.transformer) /* --recipe sets it for any network */
        TRY(model_set_drop_path(&opened->model, all->drop_path));
    if (!isnan(all->dropout))
        TRY(model_set_dropout(&opened->model, all->dropout));
    if (all->fp32_layers)
        TRY(layer_precision_choose(all->fp32_layers, &opened->model));
    TRY(begin(all, opened));
    TRY(job_samples(&all->job, &opened->samples));
    TRY(plan(all, partition, opened));
    TRY(check_steps(all, &opened->job.train));
    TRY(resume_check_state(&opened->job));
    if (all->save_batch && partition->rank == 0)
        TRY(export_batch(&opened->job.train, &(struct resources){.threads = 1}, all->save_batch));
    if (!all->data_path || partition->rank > 0)
        return STATUS_OK;
    TRY(export_data(&opened->job.train, opened->initial, &opened->identity, all->data_path));
    status_say("the samples and the initial parameters were written to %s", all->data_path);
    return STATUS_OK;
}

/* Returns the smallest value of --batch: every part of a rank's step and every micro-batch needs a sample. */
static uint64_t smallest_batch(const struct train_parameters *parameters, const struct partition *partition)
{
    uint64_t ranks = partition->ranks, parts = ranks * parameters->accumulate;
    uint64_t micros = parameters->micros * (ranks / stages_of(parameters, partition));
    uint64_t total = parameters->parallel == PARALLEL_PIPELINE && micros > ranks ? micros : parts;
    return partition->strong ? total : (total + ranks - 1) / ranks;
}

/* With --resume: refuses other options than those of the checkpoint, before any data are read. */
static enum status check_resumed(const struct train_parameters *all, struct opened *opened)
{
    if (!all->resume)
        return STATUS_OK;
    TRY(identify(all, opened));
    const struct train_job job = {
        .checkpoints = all->checkpoint, .identity = opened->identity, .largest = all->largest};
    return resume_check_options(&job, model_tables[all->model].name);
}

/* If --mix does not name --data, names the source that ends an epoch as the data, because its test set is
 * used. */
static enum status name_mixed_data(struct job_parameters *job)
{
    static char path[PATH_MAX];
    struct data_mix mix = {.count = 0};
    if (job->feed != DATA_MIXED || !job->mix.mix)
        return STATUS_OK;
    enum status status = data_mix_parse(&job->mix, &mix);
    const char *named = status == STATUS_OK ? mix.sources[mix.named].path : NULL;
    if (named && data_mix_find(&mix, "load") == MIXTURE_SOURCES) {
        snprintf(path, sizeof path, "%s", named);
        job->data = path;
    }
    data_mix_free(&mix);
    return status;
}

/* Sets the parameters that follow from others, and those of all ranks, and checks them. */
static enum status read_parameters(const struct options *given, const struct partition *partition,
                                   struct train_parameters *parameters, struct train_parameters *all)
{
    parameters->job.feed = chosen_feed(parameters);
    if (parameters->job.feed == DATA_MIXED)
        parameters->repeats = 1; /* a recipe may set it; --repeats is refused */
    TRY(name_mixed_data(&parameters->job));
    /* --dry-run needs the samples themselves only to compare them with a checkpoint, or to write files. */
    parameters->job.describe = options_flag(given, "dry-run") && !parameters->resume &&
                               !parameters->step_path && !parameters->data_path && !parameters->save_batch;
    parameters->ranks = partition->ranks;
    parameters->replicated = partition->ranks > stages_of(parameters, partition);
    parameters->chooses = parameters->parallel == PARALLEL_AUTO;
    if (parameters->chooses) /* until train_choose() has chosen */
        parameters->parallel = PARALLEL_DATA;
    parameters->largest = parameters->job.batch == OPTION_MAX;
    if (parameters->largest)
        parameters->job.batch = smallest_batch(parameters, partition);
    *all = of_all_ranks(parameters, partition);
    return check_options(given, parameters, all, partition);
}

static enum status train_validate(const struct options *given, const void *parameters,
                                  const struct partition *partition)
{
    struct train_parameters copy = *(const struct train_parameters *)parameters, all;
    return read_parameters(given, partition, &copy, &all);
}

/* Sets the batch in `parameters` to the batch of this rank, because the rows show it. */
static enum status train_open(const struct options *given, void *parameters_,
                              const struct partition *partition, void **input)
{
    struct train_parameters *parameters = parameters_;
    struct opened *opened = *input = calloc(1, sizeof *opened);
    TRY(comm_agree(ALLOCATED(opened, "out of memory"))); /* the ranks meet again below */
    job_hide_secrets(&parameters->job);
    struct train_parameters all;
    enum status status = read_parameters(given, partition, parameters, &all);
    if (status == STATUS_OK)
        status = read_balance(parameters, partition, opened);
    if (status == STATUS_OK)
        status = read_limits(parameters, partition, opened);
    if (status == STATUS_OK)
        status = read_state(parameters->begin_path, &opened->begin);
    if (status == STATUS_OK && partition->rank == 0)
        status = resume_take_share(&all.job.mix, all.resume ? all.checkpoint : NULL);
    if (status == STATUS_OK && partition->rank == 0)
        status = check_resumed(&all, opened);
    TRY(comm_agree(status));
    TRY(comm_spread(&all.job.mix.share, sizeof all.job.mix.share));
    parameters->job.mix.share = all.job.mix.share;
    TRY(open_all(given, &all, partition, opened));
    if (!all.job.test_size && !all.job.given)
        data_warn_of_few(&opened->data, all.job.test_data ? "test-data" : "data",
                         all.job.test_data ? all.job.test_data : all.job.data);
    if (parameters->job.resident_bytes == OPTION_ALL) /* the row says how many these are */
        parameters->job.resident_bytes = opened->data.resident_bytes;
    if (strcmp(parameters->job.data, "synth") == 0 && !parameters->largest)
        parameters->job.classes = opened->data.classes; /* of a preset or a file, if they were not given */
    struct partition divided = *partition;
    divided.strong |= all.reduced_batch; /* the ranks divide the training set */
    parameters->job.batch =
        partition_share(&divided, all.reduced_batch ? all.job.batch : parameters->job.batch).count;
    parameters->stages = stages_of(parameters, partition);
    if (parameters->chooses && options_flag(given, "dry-run")) /* which chooses nothing */
        parameters->parallel = PARALLEL_AUTO;
    return STATUS_OK;
}

/* ---- --batch max ---- */

static void train_range(const void *input, const void *parameters, const struct partition *partition,
                        uint64_t *least, uint64_t *most)
{
    uint32_t count = ((const struct opened *)input)->data.sets[DATA_TRAIN].count;
    *least = smallest_batch(parameters, partition);
    *most = partition->strong ? count : count / partition->ranks;
}

static enum status train_set_batch(void *input, void *parameters_, const struct partition *partition,
                                   uint64_t batch, uint32_t probes)
{
    struct train_parameters *parameters = parameters_;
    struct opened *opened = input;
    parameters->job.batch = batch;
    const struct train_parameters all = of_all_ranks(parameters, partition);
    TRY(plan(&all, partition, opened));
    opened->probes = probes;
    if (probes == 0) {
        opened->job.checkpoints = opened->job.step_path = opened->job.log_path = NULL;
        opened->job.resume = opened->job.shows_memory = false;
        opened->job.tries = true;
    }
    parameters->job.batch = partition_share(partition, batch).count;
    return STATUS_OK;
}

enum status train_plan_ranks(struct opened *opened, const struct variant *variant,
                             const struct resources *resources, uint64_t *needed, uint64_t *room)
{
    uint64_t own[2] = {0, 0};
    void *state = NULL;
    opened->job.plans = true;
    enum status status = variant->setup(resources, opened, &state);
    if (status == STATUS_OK)
        status = trainer_planned(state, resources, &own[0], &own[1], &opened->context_bytes);
    if (state)
        variant->teardown(state);
    opened->job.plans = false;
    TRY(comm_agree(status));
    TRY(comm_gather(&own[0], sizeof own[0], needed));
    TRY(comm_gather(&own[1], sizeof own[1], room));
    TRY(comm_spread(needed, (size_t)comm_size() * sizeof *needed));
    return comm_spread(room, (size_t)comm_size() * sizeof *room);
}

/* Implements workload->largest.plan(). */
static enum status train_plan(void *input, const struct variant *variant, const struct resources *resources,
                              uint64_t *needed_bytes, uint64_t *room_bytes)
{
    const size_t ranks = (size_t)comm_size();
    FREED uint64_t *needed = calloc(2 * ranks, sizeof *needed);
    TRY(comm_agree(ALLOCATED(needed, "out of memory for the plan")));
    uint64_t *room = needed + ranks;
    TRY(train_plan_ranks(input, variant, resources, needed, room));
    size_t worst = 0;
    for (size_t i = 1; i < ranks; i++)
        if ((double)needed[i] - (double)room[i] > (double)needed[worst] - (double)room[worst])
            worst = i;
    *needed_bytes = needed[worst];
    *room_bytes = room[worst];
    return STATUS_OK;
}

/* ---- --mix synth:auto ---- */

static bool train_mix_open(const void *input)
{
    const struct data_mixture *mixture = ((const struct opened *)input)->data.mixture;
    return mixture && mixture->mix.automatic && !mixture->chosen;
}

static enum status train_mix_set(void *input, void *parameters_, const struct partition *partition,
                                 uint32_t share, bool last)
{
    struct train_parameters *parameters = parameters_;
    struct opened *opened = input;
    struct train_parameters all = of_all_ranks(parameters, partition);
    all.job.batch = opened->job.train.batch;
    parameters->job.mix.share = all.job.mix.share = share;
    TRY(data_mixture_set_share(&opened->data, share));
    opened->data.mixture->chosen = last;
    TRY(normalise(&all, &opened->data));
    TRY(plan(&all, partition, opened));
    if (last)
        return check_steps(&all, &opened->job.train);
    opened->job.checkpoints = opened->job.step_path = opened->job.log_path = opened->job.state_path = NULL;
    opened->job.resume = opened->job.shows_memory = false;
    return STATUS_OK;
}

/* ---- The workload ---- */

static const char *const single[] = {"checkpoint",  "export",     "export-state",
                                     "export-step", "save-batch", NULL};

static const char *const shown[] = {"train_loss", "train_acc", "test_acc", NULL};
static const char *const baselines[] = {"train-naive", NULL};

/* Returns a hash of the samples, for the comparison of the ranks. */
static uint64_t train_identity(const void *input)
{
    const struct opened *opened = input;
    return fnv_add(FNV_BEGIN, opened->data.hashes, sizeof opened->data.hashes);
}

static const char *train_folder(const void *input)
{
    return ((const struct opened *)input)->job.checkpoints;
}

const struct workload workload_train = {
    .name = "train",
    .schema = "train/13",
    .summary = "trains a network to classify, epoch by epoch",
    .item = "samples",
    .options = options,
    .option_count = COUNT_OF(options),
    .option_sections = sections,
    .parameters_bytes = sizeof(struct train_parameters),
    .defaults = train_defaults,
    .single = single,
    .columns = train_columns,
    .shown = shown,
    .cpu_stand_in = "train-omp",
    .baselines = baselines,
    .open = train_open,
    .close = train_close,
    .repartition = job_stay,
    .applies = train_applies,
    .validate = train_validate,
    .suits = train_suits,
    .accepts = train_accepts,
    .largest = {job_batch, train_range, train_set_batch, trainer_probe, train_plan},
    .choice = {train_chooses, train_choose},
    .mix = {train_mix_open, train_mix_set, trainer_probe_stalls, DATA_MIX_SHARES},
    .epochs.check = trainer_check,
    .epochs.more = trainer_more,
    .work = train_work,
    .verify = trainer_verify,
    .measure = train_measure,
    .ranks.identity = train_identity,
    .checks.verdict = trainer_verdict,
    .epochs.keep = trainer_keep,
    .epochs.folder = train_folder,
    .epochs.kept = trainer_kept,
    .epochs.end = trainer_end,
};
