// program.c: the trainer around an engine that was compiled elsewhere (variants.py).
#include "gdn/trainer.h"

extern const EngineApi engine_cpu_f32;

int main(int argc, char **argv) { return trainer_main(argc, argv, &engine_cpu_f32); }
