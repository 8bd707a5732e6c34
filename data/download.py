"""Downloads: the file list of a dataset on the Hugging Face Hub, and single files that are resumed and verified."""

import email.utils
import errno
import hashlib
import http.client
import os
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request

from shardfile import DataError

TIMEOUT = 60  # seconds without a byte
WAIT_FIRST, WAIT_LONGEST = 0.2, 60.0  # seconds between attempts, doubled each time
CHUNK = 1 << 20


class Flaw(Exception):
    """An attempt that failed and may go well the next time. Its text says why."""


class Stopped(Exception):
    """The run is ending; what has arrived is kept."""


def hash_file(path, checksum, stop=None, progress=None):
    """The checksum of a file, of the same kind as `checksum`: SHA-256 (64 hex digits), or git's blob id (40)."""
    with open(path, "rb") as f:
        if len(checksum) == 40:
            state = hashlib.sha1(b"blob %d\0" % os.fstat(f.fileno()).st_size, usedforsecurity=False)
        else:
            state = hashlib.sha256()
        while piece := f.read(CHUNK):
            if stop and stop.is_set():
                raise Stopped()
            state.update(piece)
            if progress:
                progress(len(piece))
    return state.hexdigest()


def backoff(attempt):
    return min(WAIT_FIRST * 2**attempt, WAIT_LONGEST)


def _line(e):
    return " ".join(str(e).split())[:300]


def list_files(repo, pattern, revision, retries, warn):
    """(commit, [[path, bytes, checksum], ...] sorted by path) of the files of a Hub dataset whose path matches."""
    try:
        import huggingface_hub
        import huggingface_hub.errors as errors
    except ImportError:
        raise DataError("the Python package huggingface_hub is missing: run scripts/setup.sh test and use .venv/bin/python", 3)
    final = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError)
    api, folder = huggingface_hub.HfApi(), pattern.rpartition("/")[0].partition("*")[0].rstrip("/")
    for attempt in range(retries + 1):
        try:
            commit = api.dataset_info(repo, revision=revision, timeout=TIMEOUT).sha
            if not re.fullmatch("[0-9a-f]{40}", commit or ""):
                raise Flaw(f"the answer names the commit {commit!r}")
            tree = api.list_repo_tree(repo, folder or None, recursive=True, revision=commit, repo_type="dataset")
            found = [
                [f.path, f.size, f.lfs.sha256 if f.lfs else f.blob_id]
                for f in tree
                if isinstance(f, huggingface_hub.hf_api.RepoFile) and _matches(f.path, pattern)
            ]
            break
        except final as e:
            raise DataError(f"{api.endpoint}: {repo} at {revision}: {_line(e)}")
        except Exception as e:  # of several packages: broken connections, error pages, answers that are not JSON
            if attempt == retries:
                problem = f"{api.endpoint}: cannot list the files of {repo} at {revision}: {_line(e)}"
                raise DataError(f"{problem}; HF_ENDPOINT names a mirror")
            warn(f"{api.endpoint}: cannot list the files of {repo}: {_line(e)}; trying again in {backoff(attempt):g} s")
            time.sleep(backoff(attempt))
    if not found:
        raise DataError(f"{api.endpoint}: {repo} at {commit} has no file {pattern}")
    return commit, sorted(found)


def _matches(path, pattern):
    expression = re.escape(pattern).replace(r"\*\*", ".*").replace(r"\*", "[^/]*")
    return re.fullmatch(expression, path) is not None


def hub_url(repo, path, revision, repo_type="dataset"):
    import huggingface_hub

    return huggingface_hub.hf_hub_url(repo, path, repo_type=repo_type, revision=revision)


def _request(url, offset):
    request = urllib.request.Request(url, headers={"User-Agent": "train_gdn-data", "Accept-Encoding": "identity"})
    if offset:
        request.add_header("Range", f"bytes={offset}-")
    token = os.environ.get("HF_TOKEN")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if token and url.startswith(endpoint.rstrip("/") + "/"):  # not sent on to the host of a redirect
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    return request


def _check_answer(answer, offset, size):
    """The offset at which the body begins; Flaw when the body cannot be the file."""
    kind, length = answer.headers.get("Content-Type", "no type"), answer.headers.get("Content-Length")
    if answer.status == 206:
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
        if not span or int(span[1]) != offset or int(span[2]) != size:
            found = answer.headers.get("Content-Range", "no Content-Range")
            raise Flaw(f"the server offers '{found}', needed bytes from {offset} of {size}")
        return offset
    if answer.status != 200:
        raise Flaw(f"the server answers with status {answer.status}")
    if length is not None and int(length) != size:
        raise Flaw(f"the server offers {length} bytes of {kind}, needed {size}")
    if kind.startswith("text/html"):
        raise Flaw(f"the server sends an HTML page in place of the file of {size} bytes")
    return 0


def _attempt(url, path, size, stop, progress):
    """Appends to path.part until it has `size` bytes."""
    part = path + ".part"
    offset = os.path.getsize(part) if os.path.exists(part) else 0
    if offset > size:
        os.truncate(part, 0)
        offset = 0
    if offset == size:
        return
    with urllib.request.urlopen(_request(url, offset), timeout=TIMEOUT) as answer:
        begin = _check_answer(answer, offset, size)
        with open(part, "ab") as f:
            if begin != offset:  # the server knows no ranges
                f.truncate(0)
                progress(-offset)
                offset = 0
            while offset < size:
                if stop.is_set():
                    raise Stopped()
                piece = answer.read1(min(CHUNK, size - offset))
                if not piece:
                    raise Flaw(f"the connection ended after {offset} of {size} bytes")
                f.write(piece)
                offset += len(piece)
                progress(len(piece))
            if answer.read1(1):
                raise Flaw(f"the server sends more than the {size} bytes that it should")
            f.flush()
            os.fsync(f.fileno())


def download(url, path, size, checksum, retries, stop, progress, warn):
    """Puts the file at `path`, whole and verified, or raises DataError. Goes on with path.part where there is one.

    stop: an Event that ends it early; progress(bytes); warn(text) says what was damaged and is loaded again.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    part, failures, bad = path + ".part", 0, 0
    if os.path.exists(part):
        progress(min(os.path.getsize(part), size))
    while True:
        before = os.path.getsize(part) if os.path.exists(part) else 0
        wait = None
        try:
            _attempt(url, path, size, stop, progress)
            found = hash_file(part, checksum, stop)
            if found == checksum:
                os.rename(part, path)
                return
            with open(part, "rb") as f:
                page = "; it looks like an HTML page" if f.read(200).lstrip()[:1] == b"<" else ""
            os.unlink(part)
            progress(-size)
            before, bad = size, bad + 1
            raise Flaw(f"damaged: its checksum is {found}, needed {checksum}{page}")
        except urllib.error.HTTPError as e:
            reason = f"the server answers with status {e.code} {e.reason}"
            if e.code in (401, 403, 404, 410):
                raise DataError(f"{path}: cannot download {url}: {reason}")
            if e.code == 416:  # cannot go on where we are
                progress(-before)
                os.unlink(part)
            wait = _retry_after(e.headers.get("Retry-After"))
        except urllib.error.URLError as e:
            reason = _line(e.reason)
        except (Flaw, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as e:
            reason = _line(e) or type(e).__name__
        except OSError as e:
            if e.errno not in (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH):
                raise
            reason = _line(e)
        now = os.path.getsize(part) if os.path.exists(part) else 0
        failures = 0 if now > before else failures + 1
        if failures > retries or bad > 2:
            kept = f"; {now} of {size} bytes are kept: run it again to go on" if now else ""
            raise DataError(f"{path}: cannot download {url}: {reason}{kept}")
        warn(f"{path}: {reason}; trying again")
        if stop.wait(backoff(max(failures - 1, 0)) if wait is None else wait):
            raise Stopped()


def _retry_after(text):
    if not text:
        return None
    try:
        wait = float(text)
    except ValueError:
        try:
            wait = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(wait, 0.0), 600.0)
