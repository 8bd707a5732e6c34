"""Loads a checkpoint of train_gdn whose layers no model class of fla can hold: GDN-2 and its hybrids, Mamba2 with MLPs,
stacks of several kinds of mixers, the ablations. train_gdn writes this file into the checkpoint's folder:

    pip install "flash-linear-attention>=0.6.0"
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16).cuda()

The model is built from "train_gdn" in config.json. GDN, GDN-2, KDA and DeltaNet are the layers of fla (flash-linear-
attention, whose kernels need a GPU), with the output gate that config.json names: for GDN-2 and KDA fla has sigmoid
alone, and GDN-2's paper has SiLU. Written here are, on fla's kernels, the delta rules that it has no layer for
(OtherDelta), and Mamba2, whose layer in fla needs mamba_ssm or else gives the heads the wrong groups; and attention,
since fla's needs flash_attn, which takes no fp32. No cache: generate() reads the whole text again for every token.
"""
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutput

try:
    from fla.layers import DeltaNet, GatedDeltaNet, GatedDeltaNet2, KimiDeltaAttention
    from fla.modules import FusedRMSNormGated, GatedMLP, ShortConvolution
    from fla.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla
except ImportError as e:
    raise ImportError(f'{e}: this model needs fla: pip install "flash-linear-attention>=0.6.0"') from e


class TrainGdnConfig(PretrainedConfig):
    """`train_gdn` holds the settings of the model, as train_gdn writes and reads them; the other keys repeat some."""

    model_type = "train_gdn"

    def __init__(self, train_gdn=None, **kwargs):
        self.train_gdn = train_gdn or {}
        super().__init__(**kwargs)


def output_gate(c, kind):
    """silu, sigmoid or none: what the layers of one kind have."""
    auto = {"deltanet": "none", "kda": "sigmoid"}.get(kind, "silu")
    return auto if c["output_gate"] == "auto" else c["output_gate"]


def make_mixer(c, kind, index):
    if kind in ("swa", "attn"):
        return Attention(c, c["window"] if kind == "swa" else None)
    if kind == "mamba2":
        return Mamba2(c)
    gate, decays = output_gate(c, kind), kind == "deltanet" or c["decay"]
    stock = decays and c["qk_norm"] == "l2" and c["l2_eps"] == 1e-6 and c["output_norm"]
    common = dict(hidden_size=c["width"], num_heads=c["heads"], use_short_conv=c["conv_size"] > 0,
                  conv_size=c["conv_size"] or 4, allow_neg_eigval=c["beta_max"] == 2, norm_eps=c["norm_eps"],
                  layer_idx=index)
    heads = dict(common, head_dim=c["head_k"], num_v_heads=c["v_heads"],
                 expand_v=c["head_v"] / c["head_k"] * (1 + 1e-12))  # fla rounds head_dim * expand_v down
    if stock and kind == "gdn":
        return GatedDeltaNet(use_gate=gate != "none", **heads,
                             output_gate_activation="sigmoid" if gate == "sigmoid" else "swish")
    if stock and kind == "deltanet" and gate != "sigmoid" and c["v_heads"] == c["heads"]:
        up = 1 + 1e-12  # fla rounds width * expand down
        return DeltaNet(expand_k=c["heads"] * c["head_k"] / c["width"] * up, use_gate=gate == "silu",
                        expand_v=c["heads"] * c["head_v"] / c["width"] * up, **common)
    if stock and gate != "none" and (kind == "kda" or (kind, c["erase"], c["write"]) == ("gdn2", "channel", "channel")):
        if kind == "kda":
            layer = KimiDeltaAttention(lower_bound=c["kda_lower_bound"] or None, **heads)
        else:
            layer = GatedDeltaNet2(**heads)
        layer.o_norm = FusedRMSNormGated(c["head_v"], eps=c["norm_eps"],
                                         activation="sigmoid" if gate == "sigmoid" else "swish")
        return layer
    return OtherDelta(c, kind)


class OtherDelta(nn.Module):
    """A delta rule in a form that fla has no layer for. Per head, with a state S [head_k, head_v]:
    S_t = (I - k (b*k)^T) Diag(exp g) S_{t-1} + k (w*v)^T, o = S_t^T q / sqrt(head_k); all but GDN-2 have one beta a
    head for b and w, GDN and DeltaNet one decay a head or none."""

    def __init__(self, c, kind):
        super().__init__()
        d, K, V, H, HV = c["width"], c["head_k"], c["head_v"], c["heads"], c["v_heads"]
        channels, gated = kind in ("gdn2", "kda"), output_gate(c, kind) != "none"
        self.c, self.kind, self.gate = c, kind, output_gate(c, kind)
        self.q_proj, self.k_proj = nn.Linear(d, H * K, bias=False), nn.Linear(d, H * K, bias=False)
        self.v_proj = nn.Linear(d, HV * V, bias=False)
        if c["conv_size"]:
            self.q_conv1d = ShortConvolution(H * K, c["conv_size"], activation="silu")
            self.k_conv1d = ShortConvolution(H * K, c["conv_size"], activation="silu")
            self.v_conv1d = ShortConvolution(HV * V, c["conv_size"], activation="silu")
        self.b_proj = nn.Linear(d, H * K if kind == "gdn2" else HV, bias=False)
        if kind == "gdn2":
            self.w_proj = nn.Linear(d, HV * V, bias=False)
        self.decays = kind != "deltanet" and bool(c["decay"])
        if self.decays:
            gates = H if kind == "gdn2" else HV
            if channels:
                self.f_proj = nn.Sequential(nn.Linear(d, V, bias=False), nn.Linear(V, gates * K, bias=False))
            else:
                self.a_proj = nn.Linear(d, gates, bias=False)
            self.A_log = nn.Parameter(torch.zeros(gates))
            self.dt_bias = nn.Parameter(torch.zeros(gates * K if channels else gates))
        if gated and channels:
            self.g_proj = nn.Sequential(nn.Linear(d, V, bias=False), nn.Linear(V, HV * V, bias=True))
        elif gated:
            self.g_proj = nn.Linear(d, HV * V, bias=False)
        if c["output_norm"]:
            self.o_norm = nn.RMSNorm(V, eps=c["norm_eps"])
        self.o_proj = nn.Linear(HV * V, d, bias=False)

    def features(self, name, x):
        """q, k or v: projection, convolution, SiLU; [batch, tokens, heads, size]."""
        y = getattr(self, f"{name}_proj")(x)
        y = getattr(self, f"{name}_conv1d")(y)[0] if self.c["conv_size"] else F.silu(y)
        return y.unflatten(-1, (-1, self.c["head_v"] if name == "v" else self.c["head_k"]))

    def norm(self, x):
        x = x.float()
        if self.c["qk_norm"] == "l1":
            return x / (x.abs().sum(-1, keepdim=True) + self.c["l2_eps"])
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.c["l2_eps"])

    def decay(self, x):
        """log decay of the value heads, in fp32"""
        c = self.c
        f = self.a_proj(x)[..., None] if self.kind == "gdn" else self.f_proj(x).unflatten(-1, (-1, c["head_k"]))
        f = f.float() + self.dt_bias.float().view(f.shape[-2:])
        A = self.A_log.float().exp()[:, None]
        if self.kind == "kda" and c["kda_lower_bound"]:
            return c["kda_lower_bound"] * torch.sigmoid(A * f)
        return -A * F.softplus(f)

    def forward(self, hidden_states, attention_mask=None):
        c, x = self.c, hidden_states
        share = c["v_heads"] // c["heads"]  # value heads of a key head
        q, k = (self.norm(self.features(n, x)).repeat_interleave(share, 2) for n in "qk")
        v = self.features("v", x)
        b = c["beta_max"] * torch.sigmoid(self.b_proj(x).float())
        if self.kind == "gdn2":
            w = torch.sigmoid(self.w_proj(x).float())
            b, w = b.unflatten(-1, (-1, c["head_k"])), w.unflatten(-1, (-1, c["head_v"]))
            b = b.mean(-1, keepdim=True) if c["erase"] == "head" else b
            w = w.mean(-1, keepdim=True) if c["write"] == "head" else w
            b = b.repeat_interleave(share, 2)
        else:
            w = b = b[..., None]
        g = self.decay(x) if self.decays else q.new_zeros(1, 1, 1, 1)
        if self.kind == "gdn2" and self.decays:
            g = g.repeat_interleave(share, 2)
        b, g, w = b.expand_as(q), g.expand_as(q), w.expand_as(v)
        rule = chunk_gdn2 if torch.is_grad_enabled() or x.shape[1] > 64 else fused_recurrent_gdn2
        q, k, b, w = (t.to(v.dtype).contiguous() for t in (q, k, b, w))
        o, _ = rule(q=q, k=k, v=v.contiguous(), g=g.contiguous(), b=b, w=w, use_qk_l2norm_in_kernel=False)
        if c["output_norm"]:
            o = self.o_norm(o)
        if self.gate != "none":
            z = self.g_proj(x).unflatten(-1, (-1, c["head_v"]))
            o = o * (F.silu(z) if self.gate == "silu" else torch.sigmoid(z))
        return (self.o_proj(o.flatten(-2)),)


class Mamba2(nn.Module):
    """Per head, with a state S [mamba_state, mamba_head]: S_t = exp(-dt exp(A_log)) S_{t-1} + B (dt x)^T,
    y = S_t^T C + D x; then an RMSNorm of y SiLU(z) over the channels of a group."""

    def __init__(self, c):
        super().__init__()
        inner, self.heads = c["width"] * c["mamba_expand"], c["width"] * c["mamba_expand"] // c["mamba_head"]
        self.groups, self.state, self.conv1d = c["mamba_groups"], c["mamba_state"], None
        self.parts = (inner, self.groups * self.state, self.groups * self.state)  # x, B, C: what the convolution mixes
        self.in_proj = nn.Linear(c["width"], inner + sum(self.parts) + self.heads, bias=False)
        if c["conv_size"]:
            self.conv1d = ShortConvolution(sum(self.parts), c["conv_size"], bias=True, activation="silu")
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.heads))
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm = nn.RMSNorm(inner, eps=c["norm_eps"])
        self.out_proj = nn.Linear(inner, c["width"], bias=False)

    def forward(self, hidden_states, attention_mask=None):
        z, x, dt = self.in_proj(hidden_states).split((self.parts[0], sum(self.parts), self.heads), -1)
        x = self.conv1d(x.contiguous())[0] if self.conv1d else F.silu(x)
        if attention_mask is not None:  # the convolution's bias must not reach the state
            x = x * attention_mask[..., None].to(x.dtype)
        x, B, C = x.split(self.parts, -1)
        x = x.unflatten(-1, (self.heads, -1))
        B, C = (t.unflatten(-1, (self.groups, -1)).repeat_interleave(self.heads // self.groups, 2) for t in (B, C))
        dt = F.softplus(dt.float() + self.dt_bias.float())
        rule = chunk_simple_gla if torch.is_grad_enabled() or x.shape[1] > 64 else fused_recurrent_simple_gla
        v, g = (x * dt[..., None]).to(x.dtype), -self.A_log.float().exp() * dt
        y, _ = rule(q=C, k=B, v=v, g=g, scale=1.0)
        y = (y + self.D[:, None].to(y.dtype) * x).flatten(-2) * F.silu(z)
        y = y.unflatten(-1, (self.groups, -1))
        y = F.rms_norm(y, y.shape[-1:], eps=self.norm.eps).flatten(-2) * self.norm.weight
        return (self.out_proj(y),)


class Attention(nn.Module):
    """Causal attention with rotary positions; window: keys that a query sees, itself included (None: all before it)."""

    def __init__(self, c, window):
        super().__init__()
        d, kv = c["width"], c["attn_kv_heads"] * c["attn_head_dim"]
        n = c["attn_heads"] * c["attn_head_dim"]
        self.size, self.share, self.window = c["attn_head_dim"], c["attn_heads"] // c["attn_kv_heads"], window
        self.theta = c["rope_theta"]
        self.q_proj, self.o_proj = nn.Linear(d, n, bias=False), nn.Linear(n, d, bias=False)
        self.k_proj, self.v_proj = nn.Linear(d, kv, bias=False), nn.Linear(d, kv, bias=False)

    def rotate(self, x):  # [batch, heads, tokens, size]; the two halves of a head are the pairs
        steps = torch.arange(0, self.size, 2, device=x.device, dtype=torch.float32) / self.size
        angle = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)[:, None] * self.theta ** -steps
        a, b = x.float().chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)

    def forward(self, hidden_states, attention_mask=None):
        T = hidden_states.shape[1]
        q, k, v = (p(hidden_states).unflatten(-1, (-1, self.size)).transpose(1, 2)
                   for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotate(q), self.rotate(k).repeat_interleave(self.share, 1)
        v = v.repeat_interleave(self.share, 1)
        if attention_mask is None and (self.window is None or self.window >= T):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            i = torch.arange(T, device=q.device)
            distance = i[:, None] - i
            seen = (distance >= 0) & (distance < (self.window or T))
            if attention_mask is not None:  # a token of padding sees itself, so that no row is empty
                seen = (seen & attention_mask[:, None, None, :].bool()) | (distance == 0)
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return (self.o_proj(o.transpose(1, 2).flatten(-2)),)


class Block(GradientCheckpointingLayer):
    def __init__(self, c, index):
        super().__init__()
        kind = c["pattern"][index % len(c["pattern"])]
        self.attn_norm = nn.RMSNorm(c["width"], eps=c["norm_eps"])
        self.attn = make_mixer(c, kind, index)
        self.masks = kind in ("swa", "attn", "mamba2")
        self.mlp = None
        if c["ff"]:
            self.mlp_norm = nn.RMSNorm(c["width"], eps=c["norm_eps"])
            self.mlp = GatedMLP(c["width"], intermediate_size=c["ff"])

    def forward(self, x, attention_mask=None):
        y = self.attn_norm(x)
        if attention_mask is not None:  # zeros leave the state of a delta rule alone, which has no biases
            y = y * attention_mask[..., None].to(y.dtype)
        x = x + self.attn(hidden_states=y, attention_mask=attention_mask if self.masks else None)[0]
        return x if self.mlp is None else x + self.mlp(self.mlp_norm(x))


class Stack(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embeddings = nn.Embedding(c["vocab"], c["width"])
        self.layers = nn.ModuleList(Block(c, i) for i in range(c["layers"]))
        self.norm = nn.RMSNorm(c["width"], eps=c["norm_eps"])


class TrainGdnForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TrainGdnConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias"]  # bf16 would move the decay by up to 1.6%

    def __init__(self, config):
        super().__init__(config)
        if not config.train_gdn:
            raise ValueError('config.json has no "train_gdn": needed the settings that train_gdn writes there')
        self.model = Stack(config.train_gdn)
        self.lm_head = nn.Linear(config.train_gdn["width"], config.train_gdn["vocab"], bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embeddings

    def set_input_embeddings(self, value):
        self.model.embeddings = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **unused):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids, attention_mask=None, labels=None, use_cache=None, **kwargs):
        """Logits of every token, and with `labels` (the input_ids again; -100: no target) the loss, in which each token
        is predicted from those before it. attention_mask: 0 marks padding, on either end of a row. use_cache: ignored,
        there is none."""
        if attention_mask is not None and bool(attention_mask.all()):
            attention_mask = None
        c = self.config.train_gdn
        if c["boundary_reset"]:
            inside = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).cumsum(-1) > 1
            if bool(((input_ids == c["bos"]) & inside).any()):
                raise ValueError("trained with --boundary reset: needed one document a row, found a BOS inside of one")
        x = self.model.embeddings(input_ids)
        for layer in self.model.layers:
            x = layer(x, attention_mask=attention_mask)
        logits = self.lm_head(self.model.norm(x))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=c["vocab"], **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)
