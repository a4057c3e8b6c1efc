#include "machine/env.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/utsname.h>
#include <time.h>

#include "machine/host.h"

#ifndef FDSL_REVISION
#define FDSL_REVISION "unknown"
#endif

void env_time(char text[ENV_TIME_MAX])
{
    time_t now = time(NULL);
    struct tm utc;
    *text = '\0';
    if (gmtime_r(&now, &utc))
        strftime(text, ENV_TIME_MAX, "%Y-%m-%dT%H:%M:%SZ", &utc);
}

const char *env_revision(void)
{
    return FDSL_REVISION;
}

static void capture_job(char *job_id, size_t size)
{
    const char *job = getenv("SLURM_JOB_ID");
    const char *array = getenv("SLURM_ARRAY_JOB_ID"), *task = getenv("SLURM_ARRAY_TASK_ID");
    if (array && *array && task && *task)
        snprintf(job_id, size, "%s_%s", array, task);
    else
        snprintf(job_id, size, "%s", job ? job : "");
}

void env_identify(struct env *env)
{
    struct utsname system;
    env_time(env->time_utc);
    if (uname(&system) == 0)
        snprintf(env->host, sizeof env->host, "%s", system.nodename);
    snprintf(env->revision, sizeof env->revision, "%s", env_revision());
    capture_job(env->job_id, sizeof env->job_id);
    system_field("/proc/cpuinfo", "model name", env->cpu_model, sizeof env->cpu_model);
}
