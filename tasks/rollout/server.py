"""Routes of the rollout server: completions for any client, new weights from the one run that has claimed it.

    GET  /health                          description, version of the weights, claim
    GET  /ready                           200 if the server can generate, else 503
    GET  /metrics                         Prometheus metrics
    POST /generate                        tokens in, tokens and log-probabilities out
    POST /top_log_probs, /vocabulary      log-probabilities of given tokens, for distillation (scoring_routes.py)
    POST /claim, /release                 a run claims the server, and renews its claim
    POST /weights/begin, bucket, finish   a new version of the weights, bucket after bucket
    POST /weights/group                   the process group through which buckets arrive
    POST /checksums                       checksums of the server's weights
    POST /cache/reset, /sleep, /wake

Bodies and answers are JSON. An error is {"kind", "error"}; clients decide by `kind`. The server never generates with a
mixture of two versions of the weights, nor, for a run, with another version than it sent. Requests of browser pages are
rejected, recognised by their Origin or by a foreign Host name.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from types import MethodType

from fastapi import Depends, FastAPI
from fastapi import Request as Http
from fastapi.responses import JSONResponse, Response

from ...templates.json_types import JsonObject
from .audio_bodies import AudioReader
from .backend import Backend
from .bodies import MEDIA, Limits, client_gone, json_body, printable
from .bucket_requests import bucket_length, probe_of, shared_bucket
from .claim import Claim
from .compatibility import (
    adapter_mismatch,
    audios_mismatch,
    images_mismatch,
    turn_mismatch,
    videos_mismatch,
    vocab_mismatch,
)
from .completion_json import as_json
from .fields import Fields, RequestError, invalid_request
from .image_bodies import ImageReader
from .metrics import CONTENT_TYPE, COUNTERS, as_text
from .process_group import open_store
from .route_errors import refuse, refuse_value, report_errors
from .scoring_routes import SCORING_ROUTES
from .video_bodies import VideoReader
from .weight_buckets import Bucket, decode_table, is_local, receive_body

SILENCE = 120.0  # seconds after which the claim of a silent run ends
POLL = 1.0  # seconds between two checks of a client's connection
log = logging.getLogger("megaswift.rollout")


class Server:
    """State and routes of a rollout server. `app` is the ASGI application."""

    def __init__(
        self,
        backend: Backend,
        model: str,
        api_key: str | None = None,
        silence: float = SILENCE,
        vocab_size: int | None = None,
        positions: int | None = None,
        hosts: Collection[str] | None = None,
        turns: Sequence[str] = (),
        images: ImageReader | None = None,
        videos: VideoReader | None = None,
        most_images: int | None = None,
        audios: AudioReader | None = None,
    ):
        """Make the server.

        `positions`: longest text of the model, in tokens.
        `hosts`: names by which clients may call this server; None: any.
        `turns`: flags of multi-turn episodes that a run must have.
        `images`, `videos`, `audios`: readers of them; None: the model takes none.
        `most_images`: of a prompt; None: any number.
        """
        self.backend, self.model, self.vocab_size = backend, model, vocab_size
        self.limits, self._most_images = Limits(vocab_size, positions, images, videos, audios), most_images
        self._key, self._hosts, self._turns = api_key, hosts, turns
        self.owner = Claim(silence)
        self.version: str | None = None  # the run's name of the weights; None: those of the model's folder
        self._invalid_reason: str | None = None  # why the present weights must not be used
        self._generating = 0  # requests in progress
        self.counts: dict[str, float] = dict.fromkeys(COUNTERS, 0)  # keys: metrics.COUNTERS
        self._updating: object | None = None  # identity of the update in progress
        self._asleep = False
        self._changed = asyncio.Condition()
        self._store: object = None  # TCPStore of the group through which buckets arrive
        self._pending_store: tuple[str, int] | None = None  # host and port of it, until the workers have joined
        self.app = self._make_app()

    def _make_app(self) -> FastAPI:
        app = FastAPI(
            title="swift rollout",
            lifespan=self._lifespan,
            dependencies=[Depends(self._check_origin)],
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
        )
        app.add_exception_handler(RequestError, refuse)
        app.add_exception_handler(ValueError, refuse_value)
        authenticated, owner = [Depends(self._check_key)], [Depends(self._check_key), Depends(self._check_run)]
        app.add_api_route("/health", self.health)
        app.add_api_route("/ready", self.ready)
        app.add_api_route("/metrics", self.metrics)
        reading = [(path, MethodType(route, self)) for path, route in SCORING_ROUTES]
        for path, route in (("/generate", self.generate), ("/claim", self.claim), *reading):
            app.add_api_route(path, report_errors(route), methods=["POST"], dependencies=authenticated)
        for path, route in (
            ("/release", self.release),
            ("/weights/begin", self.begin),
            ("/weights/bucket", self.bucket),
            ("/weights/finish", self.finish),
            ("/weights/group", self.group),
            ("/checksums", self.checksums),
            ("/cache/reset", self.reset_cache),
            ("/sleep", self.sleep),
            ("/wake", self.wake),
        ):
            app.add_api_route(path, report_errors(route), methods=["POST"], dependencies=owner)
        return app

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._watch())
        yield
        watch.cancel()
        self.backend.close()

    # ---- authentication and claims

    async def _check_origin(self, http: Http) -> None:
        """Reject requests of browser pages, which may be anybody's."""
        if "origin" in http.headers or http.headers.get("sec-fetch-site", "none") != "none":
            raise RequestError(403, "origin", "this server answers programs, not pages in a browser")
        host = re.sub(r":\d+$", "", http.headers.get("host", "")).lower()
        if self._hosts is not None and host not in self._hosts:
            raise RequestError(
                403,
                "host",
                f"this server is not called {printable(host)[:200]!r}, but {', '.join(self._hosts)}. Use one of these "
                "names, or start the server with another --host",
            )

    async def _check_key(self, http: Http) -> None:
        key = http.headers.get("authorization", "").removeprefix("Bearer ")
        if self._key and not hmac.compare_digest(key.encode(), self._key.encode()):
            raise RequestError(401, "key", "the key is missing or wrong; the server printed its location at the start")

    async def _check_run(self, http: Http) -> None:
        """Reject requests of other runs than the one with the claim, and renew its claim."""
        self.owner.check(http.headers.get("x-run", ""))

    async def claim(self, http: Http) -> JsonObject:
        """Claim or renew the claim: {run, who, adapters, vocab_size, turns, images, videos, audios, probe: {pid,
        fd, bytes, secret} or null}.

        `adapters`: rank of the adapters that the run will send; 0 or absent: full weights.
        `vocab_size`: of the run's model, if known; the server's must equal it.
        `images`, `videos`, `audios`: most of a prompt of the run; 0 or absent: none. `local` in the answer: the probe's
            memory is readable here, so that buckets can go through shared memory.
        """
        names = ("run", "who", "adapters", "vocab_size", "turns", *MEDIA, "probe")
        fields = Fields(await json_body(http), names)
        run, who = fields.text("run"), printable(fields.text("who"))
        if not run.isascii() or not run.isprintable():
            raise invalid_request("run must be ASCII, as it is sent in the header x-run")
        mismatch = adapter_mismatch(fields.integer("adapters", 0, default=0), self.backend.max_adapter_rank)
        if mismatch := mismatch or vocab_mismatch(fields.integer("vocab_size", 1, default=None), self.vocab_size):
            raise invalid_request(mismatch)
        if mismatch := turn_mismatch(fields.texts("turns", []), self._turns):
            raise invalid_request(mismatch)
        if mismatch := images_mismatch(fields.integer("images", 0, default=0), self.most_images):
            raise invalid_request(mismatch)
        if mismatch := videos_mismatch(fields.integer("videos", 0, default=0), self.most_videos):
            raise invalid_request(mismatch)
        if mismatch := audios_mismatch(fields.integer("audios", 0, default=0), self.most_audios):
            raise invalid_request(mismatch)
        probe = probe_of(fields.raw("probe", None))
        await self._release_if_ended()
        if self.owner.run is not None and not self.owner.is_held_by(run):
            if not self.owner.is_silent():
                raise self.owner.error(409)
            await self._release_silent()
        new = self.owner.run is None
        if new:
            log.info("claimed by %s", who)
            self.owner.take(run, who)
        self.owner.renew()
        local = probe is not None and is_local(*probe)
        if probe and local:
            self.owner.set_process(probe[0])
        return {
            "new": new,
            "local": local,
            "silence": self.owner.silence,
            "backend": self.backend.name,
            "nccl": self.backend.has_nccl,
            "gpus": await self.backend.gpus(),
            "version": self.version,
        }

    async def release(self) -> JsonObject:
        """Release the claim of the run."""
        await self._release(f"released by {self.owner.who}")
        return {}

    async def _release(self, reason: str) -> None:
        log.info("released: %s", reason)
        self.owner.end()
        if self._updating:
            await self._abort_update()
        if self.version is not None and self._invalid_reason is None:
            self._invalid_reason = f"its weights are those of an ended run ({self.owner.who})"

    async def _release_if_ended(self) -> None:
        if self.owner.has_ended():
            await self._release(f"{self.owner.who} has ended")

    async def _release_silent(self) -> None:
        await self._release(f"{self.owner.who} has been silent for {self.owner.silence:.0f} s")

    async def _watch(self) -> None:
        """Release the claim of a run that has ended or fallen silent, so that nothing waits for its update.

        Ends the server when its engine has failed, so that a supervisor can restart it.
        """
        while True:
            await asyncio.sleep(min(POLL, self.owner.silence / 4))
            if self.backend.has_failed():
                log.critical("the engine has failed: see the error above")
                signal.raise_signal(signal.SIGTERM)
                return
            try:
                await self._release_if_ended()
                if self.owner.is_silent():
                    await self._release_silent()
            except Exception:
                log.exception("releasing the claim failed")

    async def health(self) -> JsonObject:
        return {
            "status": "updating" if self._updating else "ok",
            "model": self.model,
            "backend": self.backend.name,
            "workers": self.backend.workers,
            "images": self.most_images,
            "videos": self.most_videos,
            "audios": self.most_audios,
            "version": self.version,
            "unfit": self._invalid_reason,
            "run": self.owner.who if self.owner.run is not None else None,
            "generating": self._generating,
        }

    @property
    def most_images(self) -> int | None:
        """Most images of a prompt; None: any number."""
        return self._most_images if self.limits.images else 0

    @property
    def most_videos(self) -> int | None:
        """Most videos of a prompt; None: any number."""
        return self.limits.videos.most if self.limits.videos else 0

    @property
    def most_audios(self) -> int | None:
        """Most audios of a prompt; None: any number."""
        return self.limits.audios.most if self.limits.audios else 0

    def _not_ready(self) -> str | None:
        """Return why the server cannot generate, None if it can."""
        return (
            "it is loading new weights" if self._updating else "it is asleep" if self._asleep else self._invalid_reason
        )

    async def ready(self) -> Response:
        reason = self._not_ready()
        return JSONResponse({"ready": reason is None, "reason": reason}, 200 if reason is None else 503)

    async def metrics(self) -> Response:
        text = as_text(self.counts, generating=self._generating, ready=int(self._not_ready() is None))
        return Response(text, media_type=CONTENT_TYPE)

    # ---- completions

    async def generate(self, http: Http) -> Response:
        """Generate: {requests: [...], sampling: {...}, images: [...], videos: [...], audios: [...], version: of the
        weights (absent: any)} -> {completions, version}."""
        body = await json_body(http)
        if any(name in body for name in MEDIA):  # decoded in a thread, so that the server stays responsive
            requests, sampling = await asyncio.to_thread(self.limits.generation, body)
        else:
            requests, sampling = self.limits.generation(body)
        work, began = self.backend.generate(requests, sampling), time.monotonic()
        completions = await self.run_work(http, work, lambda: self._check_weights(body))
        self.counts["requests"] += len(requests)
        self.counts["prompt_tokens"] += sum(request.prompt_length or len(request.tokens) for request in requests)
        self.counts["completion_tokens"] += sum(len(completion.tokens) for completion in completions)
        self.counts["generation_seconds"] += time.monotonic() - began
        answer = {"version": self.version, "completions": [as_json(completion) for completion in completions]}
        return Response(json.dumps(answer), media_type="application/json")

    async def run_work[T](self, http: Http, work: Coroutine[object, object, T], check: Callable[[], None]) -> T:
        """Return the result of `work`, during which the weights stay unchanged. Cancels it if the client disconnects.

        `check` raises the error for the client where the present weights do not allow the work.
        """
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._updating)
                check()
                self._generating += 1
        except BaseException:
            work.close()
            raise
        try:
            task = asyncio.ensure_future(work)
            while not (await asyncio.wait({task}, timeout=POLL))[0]:
                if await http.is_disconnected():
                    task.cancel()
                    await asyncio.wait({task})  # the engine's thread stops between two tokens
                    raise client_gone()
            return await task
        finally:
            async with self._changed:
                self._generating -= 1
                self._changed.notify_all()

    def check_base_weights(self) -> None:
        """Raise RequestError where the weights are not those of the model's folder."""
        if self._asleep or self.version is not None or self._invalid_reason:
            who = self.owner.who or "a run"
            raise RequestError(
                409, "order", f"this server has weights of a training run ({who}), or none: use a server of the teacher"
            )

    def _check_weights(self, body: JsonObject) -> None:
        if self._asleep:
            raise RequestError(409, "asleep", "this server is asleep: POST /wake first")
        if self._invalid_reason:
            raise RequestError(
                412, "weights", f"the server cannot generate: {self._invalid_reason}. Send weights first."
            )
        if "version" in body and body["version"] != self.version:
            raise RequestError(
                412, "weights", f"this server has version {self.version} of the weights, not {body['version']}"
            )

    # ---- weights

    async def begin(self) -> JsonObject:
        """Begin a new version, after the current requests have ended. Later requests wait until it is complete."""
        if self._asleep:
            raise RequestError(409, "asleep", "this server is asleep: POST /wake first")
        if self._updating:
            await self._abort_update()
        self._updating = this = object()
        async with self._changed:
            await self._changed.wait_for(lambda: not self._generating or self._updating is not this)
        if self._updating is not this:
            raise RequestError(
                409, "order", "this update was aborted before it began: its run has ended, or began another"
            )
        self._invalid_reason = "its weights are a mixture of two versions, since an update was aborted"
        async with self._abort_on_error():
            await self.backend.begin()
        return {}

    async def bucket(self, http: Http) -> JsonObject:
        """Load a bucket: JSON {entries, place, bytes}, or the table and the bytes."""
        self._check_updating("a bucket")
        async with self._abort_on_error():
            if http.headers.get("content-type") == "application/octet-stream":
                memory = await receive_body(bucket_length(http), http.stream())
                try:
                    entries, start = decode_table(memory.flat)
                    await self._load(Bucket(entries, memory.handle, start))
                finally:
                    memory.close()
            else:
                await self._load(shared_bucket(await json_body(http), self.owner))
        return {}

    async def _load(self, bucket: Bucket) -> None:
        if bucket.handle is None and self._pending_store is not None:
            address, self._pending_store = self._pending_store, None
            await self.backend.group(*address)  # returns once the trainer has joined
        await self.backend.load(bucket)

    async def finish(self, http: Http) -> JsonObject:
        """Complete the new version: {version}."""
        self._check_updating("/weights/finish")
        version = Fields(await json_body(http), ("version",)).text("version")
        async with self._abort_on_error():
            await self.backend.finish()
            await self.backend.reset_cache()
        self.version, self._invalid_reason = version, None
        self.counts["weight_updates"] += 1
        await self._end_update()
        return {}

    def _check_updating(self, what: str) -> None:
        if not self._updating:
            raise RequestError(409, "order", f"POST /weights/begin must precede {what}; a failed bucket ends an update")

    @contextlib.asynccontextmanager
    async def _abort_on_error(self) -> AsyncIterator[None]:
        """Abort the update where the engine fails within the context."""
        try:
            yield
        except Exception:
            await self._abort_update()
            raise

    async def _abort_update(self) -> None:
        """End the update even where the engine fails to abort it."""
        try:
            await self.backend.abort()
        except Exception:
            log.exception("the engine could not abort an update")
        finally:
            await self._end_update()

    async def _end_update(self) -> None:
        async with self._changed:
            self._updating = None
            self._changed.notify_all()

    async def group(self, http: Http) -> JsonObject:
        """Return size and store port of a new group: the trainer is rank 0, workers join with its first bucket.

        The store listens only at the address that this request was sent to.
        """
        host, size = http.scope["server"][0], self.backend.workers + 1
        self._store = open_store(host, size)
        self._pending_store = host, self._store.port
        return {"port": self._store.port, "size": size}

    async def checksums(self, http: Http) -> dict[str, str]:
        names = Fields(await json_body(http), ("names",)).texts("names")
        return await self.backend.checksums(names)

    # ---- memory

    async def reset_cache(self) -> JsonObject:
        await self.backend.reset_cache()
        return {}

    async def sleep(self, http: Http) -> JsonObject:
        level = Fields(await json_body(http), ("level",)).integer("level", 0, 2, default=1)
        async with self._changed:
            await self._changed.wait_for(lambda: not self._generating)
            self._asleep = True
        await self.backend.sleep(level)
        if level > 1:
            self._invalid_reason = "its weights were freed by /sleep"
        return {}

    async def wake(self) -> JsonObject:
        if self._asleep:  # a restarted server is awake
            await self.backend.wake()
        self._asleep = False
        return {}
