#!/usr/bin/env python3
"""check_fla.py: are train_gdn's folders models of fla (flash-linear-attention), and the other way round?

dev/test/check_fla.sh runs it. It needs a GPU with torch, transformers, fla-core and flash-linear-attention. Without a
GPU, TRITON_INTERPRET=1 runs fla's kernels on the CPU (numpy below 2.4): rows of 64 tokens, nothing disturbed, an hour.

  to fla    train_gdn trains a small model for some steps; from_pretrained loads its checkpoint. No tensor may be
            missing, unexpected or of another shape, and all are fp32.
  own       the same for models that fla has no class for: their folders hold modeling_train_gdn.py, which puts fla's
            layers together (trust_remote_code). Besides, the loss that the model computes, rows with padding on the
            left, generate(), a training step in bf16 with the decays in fp32, and save_pretrained, whose folder
            train_gdn must read.
  from fla  fla makes a model, every tensor is moved by noise, save_pretrained writes it; `train_gdn eval` reads it.

  --folder  checkpoint folders of any size, with rows of the shards that --val names: loaded as in "to fla" and compared in
            the same way, for rows of 256 and 1,024 tokens; nothing is disturbed. For models that were really trained.

In the three directions both programs compute the logits of the same tokens in fp32, for rows of 64 (where fla runs its recurrent
kernels) and of 200 tokens (its chunk kernels), and the loss. The error is the largest over all positions of
max|ours - fla's| / max|fla's|; the limit is LIMIT. So that agreement means something, every tensor of the model is
disturbed in turn, which must move the logits by ten times the error at least: a tensor that no layer read, or one in
the place of another, would be found.

Not fla's own here: flash_attn, which takes no fp32, is a stand-in over torch's fp32 attention with the same arguments;
the chunk kernels solve their triangular systems in fp32, not in TF32 (which costs 2e-3 of the logits); DeltaNet's chunk
kernel refuses fp32, so its recurrent kernel runs for rows of 200 too; of the tile shapes that fla would time against
each other, the first is taken.

Ends with a line `N passed, N failed, N skipped`; exit status 0 when nothing failed, 3 when fla cannot be run here.
"""
import argparse
import datetime
import importlib.machinery
import os
import re
import shutil
import struct
import subprocess
import sys
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

os.environ["TRITON_F32_DEFAULT"] = "ieee"  # before triton is imported: no TF32 in the chunk kernels
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The softplus of fla (ex2.approx, lg2.approx) alone has 1e-3 of a small log decay; an H200 showed 3e-5 at most.
LIMIT = 1e-3
VOCAB = 257  # bytes and a BOS; odd, so that the padding of our rows is in play
LENGTHS = ((64, 4), (200, 3))  # tokens of a row, rows
FOLDER_LENGTHS = ((256, 2), (1024, 1))  # of --folder
WINDOW = 24  # of sliding-window attention: shorter than the rows

SIZE = ["--vocab", str(VOCAB), "--width", "128", "--ff", "256", "--heads", "2", "--head-k", "64", "--head-v", "64"]
SIZE += ["--attn-heads", "4", "--attn-head-dim", "32", "--window", str(WINDOW)]
# name, fla's class, options of train_gdn
TO_FLA = [
    ("gdn", "GatedDeltaNet", "--pattern gdn --layers 3 --head-v 128"),
    ("gdn swa", "GatedDeltaNet", "--pattern gdn,swa --layers 4"),
    ("gdn swa attn, 2 kv heads", "GatedDeltaNet", "--pattern gdn,swa,attn --layers 3 --attn-kv-heads 2"),
    ("gdn, 4 value heads, beta to 2", "GatedDeltaNet", "--pattern gdn --layers 2 --v-heads 4 --beta-max 2"),
    ("gdn, tied", "GatedDeltaNet", "--pattern gdn --layers 2 --tied"),
    ("gdn, eps 0.01, sigmoid gate", "GatedDeltaNet",
     "--pattern gdn --layers 2 --norm-eps 0.01 --output-gate sigmoid"),
    ("gdn, no convolution, no gate", "GatedDeltaNet",
     "--pattern gdn --layers 2 --conv-size 0 --output-gate none"),
    ("gdn, heads of 48 and 80", "GatedDeltaNet", "--pattern gdn --layers 2 --head-k 48 --head-v 80"),
    ("kda", "KDA", "--pattern kda --layers 3"),
    ("kda swa, 4 value heads, bounded", "KDA",
     "--pattern kda,swa --layers 2 --v-heads 4 --kda-lower-bound -5 --beta-max 2"),
    ("deltanet", "DeltaNet", "--pattern deltanet --layers 3"),
    ("deltanet swa, gate, beta to 2", "DeltaNet",
     "--pattern deltanet,swa --layers 2 --output-gate silu --beta-max 2 --head-v 32"),
    ("attn", "Transformer", "--pattern attn --layers 3"),
    ("swa, 2 kv heads, tied", "Transformer", "--pattern swa --layers 2 --attn-kv-heads 2 --tied --rope-theta 500"),
]

# models that fla has no class for: name, options of train_gdn
OWN = [
    ("gdn2", "--pattern gdn2 --layers 3"),
    ("gdn2 swa", "--pattern gdn2,swa --layers 4"),
    ("gdn2 swa, tied, 4 v heads, b to 2", "--pattern gdn2,swa --layers 2 --tied --v-heads 4 --beta-max 2"),
    ("gdn2, sigmoid gate, heads of 64, 32", "--pattern gdn2 --layers 2 --output-gate sigmoid --head-v 32"),
    ("gdn2, scalar erase, 4 v heads", "--pattern gdn2 --layers 2 --erase scalar --v-heads 4 --beta-max 2"),
    ("gdn2, scalar write, no gate", "--pattern gdn2 --layers 2 --write scalar --output-gate none"),
    ("gdn2 swa, both scalar", "--pattern gdn2,swa --layers 2 --erase scalar --write scalar --tied"),
    ("mamba2 gdn swa", "--pattern mamba2,gdn,swa --layers 3 --head-v 128"),
    ("mamba2 gdn swa, tied, 2 groups", "--pattern mamba2,gdn,swa --layers 3 --tied --mamba-groups 2 --mamba-state 32"),
    ("mamba2 swa, no MLP", "--pattern mamba2,swa --layers 4 --ff 0"),
    ("mamba2, no convolution", "--pattern mamba2 --layers 2 --conv-size 0"),
    ("kda swa, SiLU gate", "--pattern kda,swa --layers 2 --output-gate silu"),
    ("kda, no gate, bounded", "--pattern kda --layers 2 --output-gate none --kda-lower-bound -5 --v-heads 4"),
    ("gdn gdn2 kda deltanet attn", "--pattern gdn,gdn2,kda,deltanet,attn --layers 5"),
    ("gdn, L1 norm, no output norm", "--pattern gdn --layers 2 --qk-norm l1 --output-norm off --v-heads 4"),
    ("gdn gdn2, no decay, no convolution", "--pattern gdn,gdn2 --layers 2 --decay off --conv-size 0"),
    ("deltanet, 4 v heads, sigmoid gate", "--pattern deltanet --layers 2 --v-heads 4 --output-gate sigmoid"),
    ("swa attn, 2 kv heads of 48", "--pattern swa,attn --layers 2 --attn-kv-heads 2 --attn-head-dim 48"),
]

FLA_SIZE = dict(vocab_size=VOCAB, hidden_size=128, intermediate_size=256, initializer_range=0.1)
DELTA = dict(num_heads=2, head_dim=64)
SWA = dict(layers=[1], num_heads=4, window_size=WINDOW)
# name, fla's class, its settings, how it is saved
FROM_FLA = [
    ("gated_deltanet", "GatedDeltaNet", dict(DELTA, num_hidden_layers=3), {}),
    ("gated_deltanet and windows", "GatedDeltaNet", dict(DELTA, num_hidden_layers=3, expand_v=1, attn=SWA), {}),
    ("gated_deltanet, attn list", "GatedDeltaNet",
     dict(DELTA, num_hidden_layers=3, attn=[dict(SWA, num_kv_heads=2), dict(layers=[2], num_heads=4, num_kv_heads=2)]),
     {}),
    ("gated_deltanet, 4 v heads, neg. eig.", "GatedDeltaNet",
     dict(DELTA, num_hidden_layers=2, num_v_heads=4, allow_neg_eigval=True), {}),
    ("gated_deltanet, tied", "GatedDeltaNet", dict(DELTA, num_hidden_layers=2, tie_word_embeddings=True), {}),
    ("gated_deltanet, eps 1e-3, no gate", "GatedDeltaNet",
     dict(DELTA, num_hidden_layers=2, norm_eps=1e-3, use_gate=False), {}),
    ("gated_deltanet, bf16, shards", "GatedDeltaNet",
     dict(DELTA, num_hidden_layers=2, intermediate_size=None, output_gate_activation="sigmoid"),
     dict(bf16=True, max_shard_size="300KB")),
    ("kda", "KDA", dict(DELTA, num_hidden_layers=3), {}),
    ("kda, bounded", "KDA", dict(DELTA, num_hidden_layers=2, safe_gate=True, lower_bound=-5.0, attn=SWA), {}),
    ("delta_net", "DeltaNet", dict(num_heads=2, num_hidden_layers=3), {}),
    ("delta_net, gate", "DeltaNet", dict(num_heads=2, num_hidden_layers=2, use_gate=True, expand_v=2.0), {}),
    ("transformer", "Transformer", dict(num_heads=4, num_hidden_layers=3), {}),
    ("transformer, window, 2 kv heads", "Transformer",
     dict(num_heads=4, num_kv_heads=2, window_size=WINDOW, num_hidden_layers=2, rope_theta=500.0), {}),
]


def quit_machine(text):
    print(f"check_fla: {text}")
    sys.exit(3)


# ---------------------------------------------------------------------------- fla, with a stand-in and fixed tiles

def install_flash_attn_stand_in(torch):
    """A module flash_attn whose functions compute in the precision of their arguments."""

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), **unused):
        """q [B, T, H, D], k and v [B, T, HK, D]; window_size (left, right): keys i-left .. i+right, -1 no limit."""
        assert dropout_p == 0.0 and not unused and q.dtype == torch.float32 and q.shape[1] == k.shape[1]
        group = q.shape[2] // k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
        i, j = (torch.arange(q.shape[2], device=q.device)[s] for s in ((slice(None), None), (None, slice(None))))
        left, right = window_size
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device)
        if causal:
            seen &= j <= i
        if left >= 0:
            seen &= j >= i - left
        if right >= 0:
            seen &= j <= i + right
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale)
        return o.transpose(1, 2)

    def flash_attn_varlen_func(*args, **kwargs):
        raise NotImplementedError("rows of different lengths are not part of this check")

    m = types.ModuleType("flash_attn")
    m.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    m.__version__ = "0.0.stand_in"
    m.flash_attn_func, m.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    sys.modules["flash_attn"] = m


def fix_triton_tiles():
    """Every autotuned kernel keeps its first configuration: same arithmetic, a minute of compiling less."""
    from triton.runtime.autotuner import Autotuner

    start = Autotuner.__init__

    def first_only(self, fn, arg_names, configs, *args, **kwargs):
        start(self, fn, arg_names, configs[:1], *args, **kwargs)

    Autotuner.__init__ = first_only


def solve_in_fp32():
    """fla names TF32 in these kernels, whatever TRITON_F32_DEFAULT says."""
    import triton.language as tl
    from fla.ops.gated_delta_rule import chunk_fwd
    from fla.ops.gdn2 import chunk_intra as gdn2_intra
    from fla.ops.kda import chunk_intra

    for module in (chunk_fwd, chunk_intra, gdn2_intra):
        assert hasattr(module, "SOLVE_TRIL_DOT_PRECISION"), module
        module.SOLVE_TRIL_DOT_PRECISION = tl.constexpr("ieee")


def import_fla():
    warnings.simplefilter("ignore")
    try:
        import torch
        import transformers
        import triton
    except ImportError as e:
        quit_machine(f"{e}: torch, triton and transformers are needed")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        quit_machine("no GPU: fla's kernels need one, or TRITON_INTERPRET=1 to be run slowly on the CPU")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    install_flash_attn_stand_in(torch)
    fix_triton_tiles()
    try:
        import fla
        import fla.models
    except ImportError as e:
        quit_machine(f"{e}: fla-core and flash-linear-attention are needed, see dev/test/check_fla.sh")
    solve_in_fp32()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    gpu = "none, Triton's interpreter" if interpreted else torch.cuda.get_device_name()
    print(f"{datetime.date.today()} | fla {fla.__version__}, transformers {transformers.__version__}, "
          f"torch {torch.__version__}, triton {triton.__version__}, python {sys.version.split()[0]} | GPU {gpu}")
    return torch, transformers, fla


# ---------------------------------------------------------------------------- train_gdn

class TrainGdn:
    def __init__(self, program, work):
        self.program, self.work = program, work
        self.train = os.path.join(work, "train.bin")
        self.val = os.path.join(work, "val.bin")

    def write_shards(self, root):
        """The repository's own text as llm.c shards: a BOS (256) before each file, then its bytes."""
        tokens = []
        for folder in ("gdn", "data", "."):
            for name in sorted(os.listdir(os.path.join(root, folder))):
                if name.endswith((".h", ".c", ".py")):
                    with open(os.path.join(root, folder, name), "rb") as f:
                        tokens += [256, *f.read()]
        need = max(rows * length + 1 for length, rows in LENGTHS)
        for path, part in ((self.train, tokens[:-need]), (self.val, tokens[-need:])):
            with open(path, "wb") as f:
                f.write(struct.pack("<256i", 20240520, 1, len(part), *[0] * 253))
                f.write(struct.pack(f"<{len(part)}H", *part))

    def call(self, *args):
        p = subprocess.run([self.program, *args], capture_output=True, text=True, timeout=300)
        if p.returncode:
            raise RuntimeError(f"{' '.join([self.program, *args])}: exit code {p.returncode}: "
                               f"{(p.stderr or p.stdout).strip()[-600:]}")
        return p.stdout

    def train_model(self, label, options):
        out = os.path.join(self.work, label)
        self.call("--model", "tiny-gdn", *SIZE, *options.split(), "--bos", "256", "--train", self.train, "--out", out,
                  "--steps", "30", "--batch", "4", "--seq-len", "64", "--total-batch", "256", "--lr", "4e-3",
                  "--warmup", "5", "--eval-every", "0", "--threads", "1", "--log-every", "30")
        return os.path.join(out, "step-00000030")

    def eval(self, folder, length, rows):
        """(loss, {tokens, targets, logits}) as numpy arrays of the first rows of the validation shard."""
        from safetensors.numpy import load_file

        path = os.path.join(self.work, "logits.safetensors")
        text = self.call("eval", folder, "--val", self.val, "--seq-len", str(length), "--batch", str(rows),
                         "--eval-batches", "1", "--threads", "4", "--write-logits", path)
        found = load_file(path)
        assert found["logits"].shape[:2] == (rows, length), found["logits"].shape
        assert f" {rows} rows of {length} tokens" in text, text
        return float(re.search(r"loss (\S+) nats/token", text).group(1)), found


# ---------------------------------------------------------------------------- the comparison

class Check:
    def __init__(self, ours, torch, transformers):
        self.ours, self.torch, self.transformers = ours, torch, transformers
        self.device = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
        self.lengths = LENGTHS if self.device == "cuda" else LENGTHS[:1]
        self.passed = self.failed = self.refused = 0

    def error(self, got, want):
        """Largest over positions of max|got - want| / max|want|; infinite where anything is not finite."""
        scale = want.abs().amax(-1)
        e = ((got - want).abs().amax(-1) / scale).max().item()
        return e if bool(self.torch.isfinite(got).all() and self.torch.isfinite(want).all()) else float("inf")

    def logits(self, model, tokens):
        with self.torch.no_grad():
            return model(tokens, use_cache=False).logits.double()

    def load(self, folder, **settings):
        """fla's model of a folder: (model, tensors, missing and unexpected ones as columns, what is wrong as texts)."""
        model, info = self.transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True,
                                                                             **settings)
        bad = [f"{k} {sorted(map(str, v))[:4]}" for k, v in info.items()
               if v and k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")]
        counts = f"{len(model.state_dict()):4d} {len(info['missing_keys']):4d} {len(info['unexpected_keys']):5d}"
        wrong = [n for n, p in model.named_parameters() if p.dtype != self.torch.float32]
        if wrong:
            bad.append(f"not fp32: {wrong[:4]}")
        return model.to(self.device).eval(), counts, bad

    def compare(self, model, folder):
        """Rows of every length: texts for the table, and what is wrong."""
        torch, columns, bad = self.torch, [], []
        for layer in model.modules():
            if type(layer).__name__ == "DeltaNet":
                layer.mode = "fused_recurrent"
        for length, rows in self.lengths:
            loss, found = self.ours.eval(folder, length, rows)
            tokens = torch.from_numpy(found["tokens"]).long().to(self.device)
            targets = torch.from_numpy(found["targets"]).long().to(self.device)
            theirs = self.logits(model, tokens)
            e = self.error(torch.from_numpy(found["logits"]).to(self.device).double(), theirs)
            fla_loss = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), targets.flatten()).item()
            columns.append(f"{e:8.1e} {loss:9.6f} {fla_loss:9.6f}")
            if not e <= LIMIT:
                bad.append(f"logits of {length} tokens differ by {e:.2e}, limit {LIMIT:g}")
            if not abs(loss - fla_loss) <= LIMIT * abs(fla_loss):
                bad.append(f"loss of {length} tokens: ours {loss}, fla's {fla_loss}, limit {LIMIT:g}")
            if length == LENGTHS[0][0] and self.device == "cuda":
                weakest, name = self.disturb(model, tokens, theirs)
                columns.append(f"{weakest:7.1e}")
                if not weakest > 10 * e:
                    bad.append(f"noise on {name} moves the logits by {weakest:.1e}: the check would not see it")
        return columns, bad

    def disturb(self, model, tokens, logits):
        """Every tensor in turn plus noise of half its size: the smallest change of the logits, and of which tensor."""
        torch, weakest = self.torch, (float("inf"), "")
        torch.manual_seed(2)
        with torch.no_grad():
            for name, p in model.named_parameters():
                keep = p.clone()
                p += torch.randn_like(p) * max(0.5 * p.pow(2).mean().sqrt().item(), 0.05)
                weakest = min(weakest, (self.error(self.logits(model, tokens), logits), name))
                p.copy_(keep)
        return weakest

    def to_fla(self, name, kind, folder):
        model, counts, bad = self.load(folder)
        if type(model).__module__.split(".")[0] != "fla" or type(model).__name__ != f"{kind}ForCausalLM":
            bad.append(f"loaded as {type(model)}")
        columns, worse = self.compare(model, folder)
        return [counts, *columns], bad + worse

    def folder(self, folder):
        model, counts, bad = self.load(folder, dtype=self.torch.float32, trust_remote_code=True)
        columns, worse = self.compare(model, folder)
        kind = f"{type(model).__module__.split('.')[0]}: {type(model).__name__}"
        return [counts, *columns, kind], bad + worse

    def own(self, name, folder):
        torch, cpu = self.torch, self.device == "cpu"
        trust = dict(trust_remote_code=True)
        model, counts, bad = self.load(folder, dtype=torch.float32, **trust)
        if type(model).__module__.split(".")[0] != "transformers_modules":
            bad.append(f"loaded as {type(model)}")
        columns, worse = self.compare(model, folder)
        bad += worse
        tokens = torch.arange(7, 7 + 2 * 24, device=self.device).view(2, 24) * 5 % VOCAB
        plain = self.logits(model, tokens)
        with torch.no_grad():
            loss = model(tokens, labels=tokens).loss.item()
        want = torch.nn.functional.cross_entropy(plain[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()
        if not abs(loss - want) <= 1e-5 * want:
            bad.append(f"loss with labels {loss}, of the logits {want}")
        mask = torch.ones(2, 29, dtype=torch.long, device=self.device)
        mask[1, :5] = 0  # the second row begins 5 tokens later; the first has 5 more in front
        front = torch.full((2, 5), 3, device=self.device)
        with torch.no_grad():
            padded = model(torch.cat((front, tokens), 1), attention_mask=mask).logits[1, 5:].double()
        if not self.error(padded, plain[1]) <= LIMIT:
            bad.append(f"padding on the left moves the logits by {self.error(padded, plain[1]):.1e}")
        new = 2 if cpu else 6
        made, by_hand = model.generate(tokens[:, :9], max_new_tokens=new, do_sample=False, eos_token_id=None,
                                       pad_token_id=0), tokens[:, :9]
        for _ in range(new):
            by_hand = torch.cat((by_hand, self.logits(model, by_hand)[:, -1:].argmax(-1)), 1)
        if made.tolist() != by_hand.tolist():
            bad.append(f"generate gives {made.tolist()}, the largest logits {by_hand.tolist()}")
        again = folder + "-saved"
        model.save_pretrained(again)
        length, rows = LENGTHS[0]
        first, second = (self.ours.eval(f, length, rows)[0] for f in (folder, again))
        if first != second:
            bad.append(f"train_gdn's loss {first}, after save_pretrained {second}")
        try:
            bad += self.own_bf16(model, folder)
        except Exception as e:  # the columns are worth seeing
            if "Triton" in str(e) and "incorrect results" in str(e):  # fla knows that its gradients are wrong there
                self.refused += 1
            else:
                bad.append(f"in bf16: {type(e).__name__}: {e}")
        return [counts, *columns], bad

    def own_bf16(self, model, folder):
        """What is wrong with the model in bf16: types, logits, and on a GPU the gradients of a training step."""
        torch, bad = self.torch, []
        half = self.transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16,
                                                                      trust_remote_code=True)
        decays = {p.dtype for n, p in half.named_parameters() if n.endswith(("A_log", "dt_bias"))} - {torch.float32}
        if decays or half.lm_head.weight.dtype != torch.bfloat16:
            bad.append(f"loaded as bf16: head {half.lm_head.weight.dtype}, decays also {decays}")
        if self.device == "cpu":
            return bad
        half = half.to(self.device).eval()
        tokens = torch.arange(200, device=self.device)[None] * 5 % VOCAB  # the chunk kernels
        e = self.error(self.logits(half, tokens), self.logits(model, tokens))
        if not e < 0.1:
            bad.append(f"in bf16 the logits differ by {e:.1e} from those in fp32")
        half.train()
        half(tokens, labels=tokens).loss.backward()
        wrong = [n for n, p in half.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
        if wrong:
            bad.append(f"no finite gradient: {wrong[:4]}")
        return bad

    def from_fla(self, number, name, kind, settings, save):
        import fla

        torch = self.torch
        save = dict(save)
        bf16 = save.pop("bf16", False)
        folder = os.path.join(self.ours.work, f"fla-{number}")
        torch.manual_seed(number)
        config = getattr(fla.models, f"{kind}Config")(**{**FLA_SIZE, **settings})
        model = getattr(fla.models, f"{kind}ForCausalLM")(config)
        with torch.no_grad():
            for p in model.parameters():
                p += torch.randn_like(p) * (0.2 if p.dim() == 1 else 0.02)
        if bf16:
            model = model.to(torch.bfloat16)
        model.save_pretrained(folder, **save)
        files = sorted(f for f in os.listdir(folder) if f.endswith(".safetensors"))
        bad = [] if ("max_shard_size" in save) == (len(files) > 1) else [f"saved as {files}"]
        if bf16:  # fla itself must read the rounded weights too
            model, _, worse = self.load(folder, dtype=torch.float32)
            bad += worse
        columns, worse = self.compare(model.to(self.device).eval(), folder)
        return [f"{len(model.state_dict()):4d}    -     -", *columns], bad + worse

    def run(self, name, work):
        start = time.time()
        try:
            columns, bad = work()
        except Exception as e:  # one model's failure is a row of the table, not the end
            import traceback

            columns, bad = ["-"], [f"{type(e).__name__}: {e}", traceback.format_exc(limit=-3)]
        print(f"{name:37s} {' '.join(columns)} {'FAILED' if bad else 'ok'} ({time.time() - start:.1f} s)", flush=True)
        for text in bad:
            print(f"FAILED: {name}: {text}", flush=True)
        self.passed += not bad
        self.failed += bool(bad)


def main():
    parser = argparse.ArgumentParser(description="train_gdn's folders against fla, both ways")
    parser.add_argument("--train-gdn", default="./train_gdn", help="the program [./train_gdn]")
    parser.add_argument("--work", default="build/fla/work", help="folder for models, emptied [build/fla/work]")
    parser.add_argument("--only", default="", help="only models whose name has this text")
    parser.add_argument("--direction", choices=("to", "own", "from", "all"), default="all",
                        help="one of the three parts of the check [all]")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th model from i on, for n runs side by side [0/1]")
    parser.add_argument("--folder", nargs="+", default=[], help="checkpoint folders to compare, and nothing else")
    parser.add_argument("--val", default="", help="shards for --folder")
    args = parser.parse_args()
    if bool(args.folder) != bool(args.val):
        parser.error("--folder and --val belong together")
    if not re.fullmatch(r"\d+/[1-9]\d*", args.part):
        parser.error(f"--part {args.part}: needed i/n, such as 0/4")
    if os.path.isdir(args.work):
        if os.listdir(args.work) and not os.path.exists(os.path.join(args.work, "val.bin")):
            parser.error(f"--work {args.work}: holds other files; needed a new folder, or one of an earlier check")
        shutil.rmtree(args.work)
    os.makedirs(args.work)
    ours = TrainGdn(os.path.abspath(args.train_gdn), os.path.abspath(args.work))
    os.environ["HF_MODULES_CACHE"] = os.path.join(ours.work, "modules")
    if args.folder:
        ours.val = args.val
        torch, transformers, _ = import_fla()
        check = Check(ours, torch, transformers)
        check.lengths = FOLDER_LENGTHS
        print(f"limit {LIMIT:g}\n{'folder':32s}tensors, missing, unexpected | "
              + " | ".join(f"T={t}: error, loss ours, fla's" for t, _ in FOLDER_LENGTHS) + " | class")
        for folder in args.folder:
            check.run(folder[-36:], lambda folder=folder: check.folder(os.path.abspath(folder)))
        print(f"{check.passed} passed, {check.failed} failed, 0 skipped")
        return 1 if check.failed else 0
    ours.write_shards(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
    part, parts = map(int, args.part.split("/"))

    def wanted(models, direction):
        return [(i, *m) for i, m in enumerate(models)
                if args.only in m[0] and i % parts == part and args.direction in (direction, "all")]

    to_fla, own = wanted(TO_FLA, "to"), wanted(OWN, "own")
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the models train while Python imports
        folders = {i: pool.submit(ours.train_model, f"ours-{i}", options) for i, _, _, options in to_fla}
        own_folders = {i: pool.submit(ours.train_model, f"own-{i}", options) for i, _, options in own}
        torch, transformers, _ = import_fla()
        check = Check(ours, torch, transformers)
        weakest = check.device == "cuda"
        lengths = " | ".join(f"T={t}: error, loss ours, fla's" + (", weakest" if n == 0 and weakest else "")
                             for n, (t, _) in enumerate(check.lengths))
        print(f"limit {LIMIT:g}" + "; weakest: change of the logits from the tensor that matters least" * weakest + "\n"
              f"{'to fla':32s}tensors, missing, unexpected | {lengths}")
        for i, name, kind, _ in to_fla:
            check.run(name, lambda i=i, kind=kind, name=name: check.to_fla(name, kind, folders[i].result()))
        print("own")
        for i, name, _ in own:
            check.run(name, lambda i=i, name=name: check.own(name, own_folders[i].result()))
        print("from fla")
        for m in wanted(FROM_FLA, "from"):
            check.run(m[1], lambda m=m: check.from_fla(*m))
    if check.refused:
        print(f"SKIPPED: {check.refused} training steps in bf16, which fla refuses with this Triton on Hopper (its #640)")
    print(f"{check.passed} passed, {check.failed} failed, {check.refused} skipped")
    return 1 if check.failed or not check.passed else 0


if __name__ == "__main__":
    sys.exit(main())
