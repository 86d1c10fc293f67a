/* llmc_worker.c - a training step of llm.c as a contestant of bench.gpt2: llmc_worker WEIGHTS TOKENS B T.
 *
 * Answers like bench/worker.py: reads the first and last batch of a turn from a line of stdin, trains on them and prints a JSON
 * line.  Batch k begins at token k B T; the targets are one token later, as in llm.c's loader.
 */
#include <time.h>
#define TESTING                         /* leaves out main() of train_gpt2.c */
#include "train_gpt2.c"

static double seconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* VmHWM, the peak memory of this process alone, in MiB. */
static double peak_mib(void) {
    char line[256];
    double kib = 0.0;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        if (!strncmp(line, "VmHWM:", 6)) kib = atof(line + 6);
    if (status) fclose(status);
    return kib / 1024.0;
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    FILE *const answers = fdopen(dup(1), "w");
    if (!answers || !freopen("/dev/null", "w", stdout)) return 1;       /* train_gpt2.c prints sizes */
    GPT2 model;
    gpt2_build_from_checkpoint(&model, argv[1]);
    const int B = atoi(argv[3]), T = atoi(argv[4]);
    FILE *file = fopenCheck(argv[2], "rb");
    int header[256];
    freadCheck(header, sizeof(int), 256, file);
    const size_t tokens = (size_t)header[2];
    uint16_t *ids = mallocCheck(tokens * sizeof *ids);
    freadCheck(ids, sizeof *ids, tokens, file);
    fcloseCheck(file);
    int *inputs = mallocCheck((size_t)B * T * sizeof(int)), *targets = mallocCheck((size_t)B * T * sizeof(int));

    fprintf(answers, "\"ready\"\n");
    fflush(answers);
    int first, last, step = 0;
    while (scanf("%d %d", &first, &last) == 2) {
        const double start = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
        for (int k = first; k < last; k++) {
            if ((size_t)(k + 1) * B * T + 1 > tokens) return 2;
            for (int i = 0; i < B * T; i++) {
                inputs[i] = ids[k * B * T + i];
                targets[i] = ids[k * B * T + i + 1];
            }
            gpt2_forward(&model, inputs, targets, B, T);
            gpt2_zero_grad(&model);
            gpt2_backward(&model);
            gpt2_update(&model, 1e-4f, 0.9f, 0.999f, 1e-8f, 0.0f, ++step);      /* as main() of train_gpt2.c calls it */
        }
        fprintf(answers, "{\"seconds\": %.7f, \"cpu_seconds\": %.7f, \"peak_mib\": %.1f, \"loss\": %.7f}\n",
                seconds(CLOCK_MONOTONIC) - start, seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu, peak_mib(), model.mean_loss);
        fflush(answers);
    }
    gpt2_free(&model);
    free(ids), free(inputs), free(targets);
    return 0;
}
