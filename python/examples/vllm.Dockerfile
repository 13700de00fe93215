# vLLM's server with the plugin: FP8 attention scales from the weights of every model that it loads.
#
#   .ci/wheel
#   docker build -f python/examples/vllm.Dockerfile -t vllm-sigmascale .
#   docker run --gpus all -p 8000:8000 vllm-sigmascale --model MODEL --kv-cache-dtype fp8
ARG VLLM=v0.26.0
FROM vllm/vllm-openai:${VLLM}
COPY dist/sigmascale-*.whl /tmp/wheel/
# Without its dependencies: vLLM has NumPy.
RUN pip install --no-cache-dir --no-deps /tmp/wheel/*.whl && rm -r /tmp/wheel && sigmascale doctor
