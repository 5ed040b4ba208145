# One image for worker, API and producer. `--build-arg FLAVOUR=gpu` takes fbgemm's CUDA build.
FROM python:3.11-slim

ARG FLAVOUR=cpu
WORKDIR /app
RUN apt-get update && apt-get install -y --no-install-recommends curl libgomp1 && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY streams streams
COPY gem gem
COPY loopfm loopfm
COPY solaris solaris
COPY downstream downstream
COPY specrank specrank
RUN case "$FLAVOUR" in cpu|gpu) ;; *) echo "FLAVOUR is $FLAVOUR; legal values: cpu, gpu" >&2; exit 1;; esac \
    && pip install --no-cache-dir ".[$FLAVOUR]" \
    && pip install --no-cache-dir --no-deps torchrec==1.8.0
COPY data data
RUN useradd --create-home specrank && mkdir -p /models && chown specrank /models
USER specrank
ENTRYPOINT ["specrank"]
CMD ["--help"]
