#include "train/display.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/timer.h"
#include "machine/ticker.h"

#define INTERVAL_S 0.25

struct display {
    const struct engine *engine;
    const void *state;
    const struct train *train;
    uint32_t epochs;
    _Atomic uint32_t running; /* current epoch, counted from 1; 0: none */
    _Atomic double begin_s;   /* start of the current epoch plus the duration of its pauses */
    /* Sums over the earlier steps of the current epoch, which the engine no longer includes in its sums. */
    _Atomic double passed_loss;
    _Atomic uint64_t passed_correct, passed_samples;
    struct ticker *ticker;
    pthread_mutex_t mutex; /* locked while a line is printed */
};

static void show(struct display *display)
{
    uint32_t epoch = atomic_load(&display->running);
    struct train_progress now;
    if (epoch == 0)
        return;
    display->engine->progress(display->state, &now);
    now.loss += atomic_load(&display->passed_loss);
    now.correct += atomic_load(&display->passed_correct);
    now.samples += atomic_load(&display->passed_samples);
    double elapsed_s = timer_now_s() - atomic_load(&display->begin_s);
    uint64_t part = train_share(display->train, 0).count; /* of this rank */
    if (now.samples == 0 || part == 0)
        return;
    uint64_t step = (now.samples + part - 1) / part;
    fprintf(stderr,
            "\r\033[Ktrain-%s: epoch %u of %u, step %llu of %u, loss %.4f, %.2f %% correct, %.0f samples/s",
            display->engine->name, epoch, display->epochs, (unsigned long long)step,
            train_steps(display->train), now.loss / (double)now.samples,
            100 * (double)now.correct / (double)now.samples, (double)now.samples / elapsed_s);
    fflush(stderr);
}

static void tick(void *context, uint64_t missed)
{
    struct display *display = context;
    (void)missed;
    pthread_mutex_lock(&display->mutex);
    show(display);
    pthread_mutex_unlock(&display->mutex);
}

struct display *display_open(const struct engine *engine, const void *state, const struct train *train,
                             uint32_t epochs)
{
    struct display *display = status_shows_progress() ? calloc(1, sizeof *display) : NULL;
    if (!display)
        return NULL;
    display->engine = engine;
    display->state = state;
    display->train = train;
    display->epochs = epochs;
    pthread_mutex_init(&display->mutex, NULL);
    if (ticker_open(INTERVAL_S, tick, display, &display->ticker) == 0)
        return display;
    display_close(display);
    return NULL;
}

void display_begin(struct display *display, uint32_t epoch)
{
    if (!display)
        return;
    atomic_store(&display->begin_s, timer_now_s());
    atomic_store(&display->running, epoch + 1);
}

void display_pass(struct display *display, const struct train_totals *totals, double epoch_s)
{
    if (!display)
        return;
    atomic_store(&display->passed_loss, totals->loss);
    atomic_store(&display->passed_correct, totals->correct);
    atomic_store(&display->passed_samples, totals->samples);
    atomic_store(&display->begin_s, timer_now_s() - epoch_s);
}

void display_end(struct display *display)
{
    if (display)
        atomic_store(&display->running, 0);
}

void display_wait(struct display *display)
{
    if (!display)
        return;
    pthread_mutex_lock(&display->mutex);
    pthread_mutex_unlock(&display->mutex);
}

void display_close(struct display *display)
{
    if (!display)
        return;
    ticker_close(display->ticker);
    pthread_mutex_destroy(&display->mutex);
    free(display);
}
