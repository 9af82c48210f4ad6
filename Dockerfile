# The CUDA runtime, Python, and the very steps that `make install` takes. Two targets:
#   docker build --target gpu -t batchwright:gpu .   pinned torch for CUDA 13, which needs driver 580 or newer
#   docker build -t batchwright .                    the newest torch that is supported; serves on a GPU if there is one
# Nothing is written but the cache (weights, profiles) and /tmp, so the root file system can be
# read-only:
#   docker run --gpus all --read-only --tmpfs /tmp --volume batchwright-cache:/home/batchwright/.cache \
#     --cap-drop ALL --security-opt no-new-privileges --publish 8000:8000 batchwright:gpu
# Without network put the weights into the volume, below torch/hub/checkpoints, or give --weights FILE; a server without
# weights ends with exit code 2.
# A model of your own: examples/image_classifier/Dockerfile extends this image.
# After SIGTERM calls are admitted for the drain delay, then finished: --stop-timeout has to be longer than both.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04 AS base

RUN apt-get update \
    && apt-get install -y --no-install-recommends make python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 batchwright \
    && mkdir /home/batchwright/.cache && chown batchwright: /home/batchwright/.cache

WORKDIR /opt/batchwright
ENV BATCHWRIGHT_HOST=0.0.0.0 BATCHWRIGHT_DRAIN_DELAY_S=5 XDG_CACHE_HOME=/home/batchwright/.cache \
    PYTHONDONTWRITEBYTECODE=1 PATH=/opt/batchwright/.venv/bin:$PATH
EXPOSE 8000
VOLUME /home/batchwright/.cache
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s \
    CMD [".venv/bin/python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/v2/health/ready')"]
STOPSIGNAL SIGTERM
ENTRYPOINT [".venv/bin/serve-model"]
CMD ["googlenet"]

FROM base AS gpu

# A model of yours that uses torch.compile needs gcc and python3-dev in addition.
COPY . .
RUN make install "EXTRAS=[grpc,otel]" \
    "TORCH=torch==2.11.0 torchvision==0.26.0 --index-url https://download.pytorch.org/whl/cu130" \
    && rm -rf /root/.cache
USER batchwright
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# The first start compares implementations of the network and profiles it.
HEALTHCHECK --interval=10s --timeout=3s --start-period=300s \
    CMD [".venv/bin/python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/v2/health/ready')"]

FROM base AS any

COPY . .
RUN make install "EXTRAS=[grpc,onnx,otel]" && rm -rf /root/.cache
USER batchwright
