package reference

// MLALatentEps is the epsilon of q_a_layernorm and kv_a_layernorm (spec F.3): the official
// code's default, not rms_norm_eps, and not in the configuration.
const MLALatentEps = 1e-6

// MLAWeights are one gated latent attention layer.
type MLAWeights[F Float] struct {
	QA     Matrix[F] // [q_lora][hidden]
	QANorm []F       // [q_lora]
	QB     Matrix[F] // [heads * (nope+rope)][q_lora]
	KVA    Matrix[F] // [kv_lora + rope][hidden]
	KVNorm []F       // [kv_lora]
	KVB    Matrix[F] // [heads * (nope+v)][kv_lora], per head the key rows, then the value rows
	Gate   Matrix[F] // [heads * v][hidden]
	Out    Matrix[F] // [hidden][heads * v]
}

// MLAState is one layer's cache. Latent and KRope are all that must be kept; Keys and
// Values are their expansion, kept so that it is done once a position.
type MLAState[F Float] struct {
	Latent [][]F   // [positions][kv_lora], normalised
	KRope  [][]F   // [positions][rope], as projected: never rotated, never normalised
	Keys   [][][]F // [positions][heads][nope+rope]
	Values [][][]F // [positions][heads][v]
}

// MLATrace holds one position's values inside an MLA layer.
type MLATrace[F Float] struct {
	Q      [][]F // [heads][nope+rope]
	Latent []F   // [kv_lora]
	KRope  []F   // [rope]
	Probs  [][]F // [heads][positions so far]
	O      [][]F // [heads][v], before the gate
	Gated  []F   // [heads * v]
}

// MLAQuery is spec C.8 step 1: x [hidden] gives per head [nope+rope].
func MLAQuery[F Float](w *MLAWeights[F], x []F, c Config) [][]F {
	q := w.QB.Mul(RMSNorm(w.QA.Mul(x), w.QANorm, MLALatentEps))
	return split(q, c.NumAttentionHeads)
}

// MLALatent is spec C.8 step 2: x [hidden] gives the normalised latent [kv_lora] and the
// shared key part [rope].
func MLALatent[F Float](w *MLAWeights[F], x []F, c Config) (latent, kRope []F) {
	y := w.KVA.Mul(x)
	return RMSNorm(y[:c.KVLoraRank], w.KVNorm, MLALatentEps), y[c.KVLoraRank:]
}

// MLAExpand is spec C.8 step 3 for one position: per head the key [nope+rope] and the
// value [v].
func MLAExpand[F Float](w *MLAWeights[F], latent, kRope []F, c Config) (keys, values [][]F) {
	for _, kv := range split(w.KVB.Mul(latent), c.NumAttentionHeads) {
		keys = append(keys, append(kv[:c.QKNopeHeadDim:c.QKNopeHeadDim], kRope...))
		values = append(values, kv[c.QKNopeHeadDim:])
	}
	return keys, values
}

// MLAAttend is spec C.8 step 5 for one head and one query q [d]: keys are [positions][d],
// values [positions][v]; every position given is visible. scale is d^-0.5.
func MLAAttend[F Float](q []F, keys, values [][]F) (out, probs []F) {
	scale := 1 / Sqrt(F(len(q)))
	s := make([]F, len(keys))
	for i, k := range keys {
		s[i] = Dot(q, k) * scale
	}
	probs = Softmax(s)
	out = make([]F, len(values[0]))
	for i, v := range values {
		for d := range out {
			out[d] += probs[i] * v[d]
		}
	}
	return out, probs
}

// MLALayer is spec C.8 for one position: x [hidden] is the normalised input, the result
// [hidden] the layer's output. It appends the position to st.
func MLALayer[F Float](w *MLAWeights[F], x []F, st *MLAState[F], c Config) ([]F, MLATrace[F]) {
	tr := MLATrace[F]{Q: MLAQuery(w, x, c)}
	tr.Latent, tr.KRope = MLALatent(w, x, c)
	keys, values := MLAExpand(w, tr.Latent, tr.KRope, c)
	st.Latent, st.KRope = append(st.Latent, tr.Latent), append(st.KRope, tr.KRope)
	st.Keys, st.Values = append(st.Keys, keys), append(st.Values, values)
	for h, q := range tr.Q {
		var ks, vs [][]F
		for s := range st.Keys {
			ks, vs = append(ks, st.Keys[s][h]), append(vs, st.Values[s][h])
		}
		o, p := MLAAttend(q, ks, vs)
		tr.O, tr.Probs = append(tr.O, o), append(tr.Probs, p)
		tr.Gated = append(tr.Gated, o...)
	}
	for i, g := range w.Gate.Mul(x) {
		tr.Gated[i] *= Sigmoid(g)
	}
	return w.Out.Mul(tr.Gated), tr
}

func split[F Float](x []F, parts int) [][]F {
	n := len(x) / parts
	y := make([][]F, parts)
	for i := range y {
		y[i] = x[i*n : (i+1)*n]
	}
	return y
}
