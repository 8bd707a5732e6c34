"""Worker processes that tokenize: a task (textfiles.py) in, the tokens of its documents out."""

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import signal

import numpy as np
import xxhash

import cuts
import shardfile
import textfiles
from shardfile import DataError

worker = None
GONE = "a worker process was killed, perhaps out of memory: fewer --workers need less"


class Worker:

    def __init__(self, tokenizer, vocab, bos, skip_bad):
        self.dtype, self.bos, self.skip_bad, self.model = shardfile.token_dtype(vocab), bos, skip_bad, None
        if tokenizer:
            import sentencepiece

            with open(tokenizer, "rb") as f:
                model = f.read()
            self.model = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.can_cut, self.space = cuts.can_cut(model), self.model.piece_to_id(cuts.SPACE)

    def encode(self, text, raw):
        """BOS and the tokens of one document; ValueError if it is too long."""
        if self.model and self.can_cut:
            tokens, parts = [np.array([self.bos], self.dtype)], cuts.cut(text)
            while some := list(itertools.islice(parts, 1024)):
                ids = self.model.encode([part for part, _ in some], num_threads=1)
                for part_ids, (_, drop) in zip(ids, some):
                    if drop and part_ids.pop(0) != self.space:
                        raise DataError("the tokenizer does not begin a text with a space: cuts.py is wrong here", 70)
                tokens.append(np.fromiter(itertools.chain.from_iterable(ids), self.dtype))
            return np.concatenate(tokens)
        if self.model:
            if len(text) > cuts.LONGEST_WHOLE:
                raise ValueError(f"has {len(text)} characters, more than {cuts.LONGEST_WHOLE}")
            return np.array([self.bos] + self.model.encode(text), self.dtype)
        return np.concatenate((np.array([self.bos], self.dtype), np.frombuffer(raw, np.uint8)), dtype=self.dtype)


def worker_start(*args):
    global worker
    worker = Worker(*args)


def worker_process(pipe, args):
    """Answers each task with its result or a DataError, until the parent closes the pipe or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the workers
    worker_start(*args)
    with contextlib.suppress(EOFError, OSError):
        while True:
            task = pipe.recv()
            try:
                result = worker_run(task)
            except DataError as e:
                result = e
            except MemoryError:
                result = DataError("out of memory: fewer --workers need less", 6)
            pipe.send(result)


def worker_run(task):
    """(tokens of all documents, lengths, bytes of text, hashes, empty documents, bad documents)"""
    tokens, sizes, hashes, empty, bad = [], [], [], 0, 0
    for text, key, error in textfiles.documents(task):
        if error and not worker.skip_bad:
            raise DataError(error + "; --skip-bad leaves out such documents")
        bad += bool(error)
        empty += text == ""
        if not text:
            continue
        raw = text.encode("utf-8")
        try:
            tokens.append(worker.encode(text, raw))
        except ValueError as e:
            if not worker.skip_bad:
                raise DataError(f"{task[1]}: the document that begins with {text[:40]!r} {e}; --skip-bad leaves it out")
            bad += 1
            continue
        sizes.append(len(raw))
        hashes.append(xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass") if key else raw))
    lengths = [len(t) for t in tokens]
    return np.concatenate(tokens) if tokens else np.zeros(0, worker.dtype), lengths, sizes, hashes, empty, bad


@contextlib.contextmanager
def worker_pool(count, args):
    """A function from tasks to results in the order of the tasks. One worker is this process itself."""
    if count == 1:
        worker_start(*args)
        yield lambda tasks: ((worker_run(task), position) for task, position in tasks)
        return
    context, processes = multiprocessing.get_context("spawn"), {}

    def in_order(tasks):
        idle, doing, done, sent, taken = list(processes), {}, {}, 0, 0  # doing: pipe -> number of its task
        tasks = iter(tasks)
        while True:
            while tasks and idle and sent < taken + 4 * count:  # bounds the memory
                task, position = next(tasks, (None, None))
                if task is None:
                    tasks = None
                    break
                pipe = idle.pop()
                try:
                    pipe.send(task)
                except OSError:
                    raise DataError(GONE, 6)
                doing[pipe] = (sent, position)
                sent += 1
            while taken in done:
                yield done.pop(taken)
                taken += 1
            if not doing and not tasks:
                return
            for pipe in multiprocessing.connection.wait(list(doing)) if doing else ():
                try:
                    result = pipe.recv()
                except (EOFError, OSError):
                    raise DataError(GONE, 6)
                if isinstance(result, DataError):
                    raise result
                number_of_task, position = doing.pop(pipe)
                done[number_of_task] = (result, position)
                idle.append(pipe)

    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=worker_process, args=(theirs, args), daemon=True)
            process.start()
            theirs.close()
            processes[ours] = process
        yield in_order
    finally:
        for pipe, process in processes.items():
            pipe.close()
            process.terminate()
        for process in processes.values():
            process.join()
