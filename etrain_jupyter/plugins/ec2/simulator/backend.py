"""Access to moto's state: instances, templates, roles.

The other modules do not use moto's classes. All of this code runs while ``lock`` is held.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC
from typing import Any

from moto.core.exceptions import ServiceException
from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import MetadataOptions, StateReason
from moto.iam.models import iam_backends
from moto.sts.models import sts_backends

from etrain_jupyter.plugins.ec2.simulator.imds import timestamp
from etrain_jupyter.plugins.ec2.simulator.market import CapacityPool, Lifecycle
from etrain_jupyter.plugins.ec2.simulator.permissions import Enforcement, World
from etrain_jupyter.plugins.ec2.simulator.wire import ACCOUNT, ApiError, tags_by_kind

SPOT_RECLAIMED = "Server.SpotInstanceTermination"
HOST_FAILED = "Server.InternalError"
GUEST_SHUTDOWN = "Client.InstanceInitiatedShutdown"
USER_SHUTDOWN = "Client.UserInitiatedShutdown"
_MESSAGES = {
    SPOT_RECLAIMED: "Spot instance termination",
    HOST_FAILED: "Internal error on launch",
    GUEST_SHUTDOWN: "Instance initiated shutdown",
    USER_SHUTDOWN: "User initiated shutdown",
}
TEMPLATE_TAG = "aws:ec2launchtemplate:"


@dataclass(frozen=True, kw_only=True)
class InstanceFacts:
    """EC2's data about an instance that is starting."""

    instance_id: str
    pool: CapacityPool
    lifecycle: Lifecycle
    region: str
    image: str
    launched_at: float
    user_data: str
    role: str
    """The role of its instance profile; empty if there is none."""
    tags: Mapping[str, str] = field(default_factory=dict)
    shows_tags: bool = False
    """True if the instance can read its own tags."""
    stops: bool = False
    """True if a shutdown from inside only stops the instance, so that its disk is still charged."""
    disk_gb: int = 8


class Backend:
    """Moto's state."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._credentials: dict[str, tuple[float, str]] = {}
        self.role_ttl_s = 3600
        self.iam = Enforcement(self.lock, self._world)

    # Instances ----------------------------------------------------------------------------------

    def instances(self) -> Iterator[Any]:
        """Yield moto's instances in all regions in use."""
        for backend in list(ec2_backends[ACCOUNT].values()):
            for reservation in list(backend.reservations.values()):
                yield from list(reservation.instances)

    def find(self, instance_id: str) -> Any:
        """Return moto's instance.

        Raises:
            ApiError: If it does not exist.
        """
        for instance in self.instances():
            if instance.id == instance_id:
                return instance
        raise ApiError(
            "InvalidInstanceID.NotFound", f"The instance ID '{instance_id}' does not exist"
        )

    def states(self) -> dict[str, str]:
        """Return the state of every instance."""
        return {instance.id: instance.state for instance in self.instances()}

    def template(self, region: str, specification: Mapping[str, Any]) -> Any:
        """Return the version of a launch template that a request refers to.

        Raises:
            ApiError: If it does not exist.
        """
        ec2 = ec2_backends[ACCOUNT][region]
        try:
            if specification.get("LaunchTemplateId"):
                template = ec2.get_launch_template(specification["LaunchTemplateId"])
            else:
                template = ec2.get_launch_template_by_name(specification["LaunchTemplateName"])
            return template.get_version(specification.get("Version", "$Default"))
        except KeyError:
            raise ApiError(
                "InvalidLaunchTemplateId.NotFound",
                f"The specified launch template, {dict(specification)}, does not exist.",
            ) from None
        except ServiceException as exc:
            raise ApiError(exc.code, exc.message) from None

    def zone_of(self, region: str, subnet: str | None) -> str:
        """Return the zone of a subnet.

        Raises:
            ApiError: If there is no such subnet.
        """
        if subnet is None:  # EC2 chooses a zone; here it is always the first
            return f"{region}a"
        try:
            return str(ec2_backends[ACCOUNT][region].get_subnet(subnet).availability_zone)
        except ServiceException as exc:
            raise ApiError(exc.code, exc.message) from None

    def check_image(self, region: str, image: str) -> None:
        """Refuse an image that does not exist."""
        if image not in ec2_backends[ACCOUNT][region].amis:
            raise ApiError("InvalidAMIID.NotFound", f"The image id '[{image}]' does not exist")

    def launch(
        self,
        version: Any,
        pool: CapacityPool,
        lifecycle: Lifecycle,
        *,
        region: str,
        subnet: str | None,
        tags: Mapping[str, Mapping[str, str]],
    ) -> str:
        """Create an instance from a version of a launch template; return its id.

        ``tags`` are those of the request by resource type, in addition to the template's.
        """
        volume_tags = tags_by_kind(version.data).get("volume", {})
        arguments: dict[str, Any] = {
            "instance_type": pool.instance_type,
            "is_instance_type_default": False,
            "launch_template": {
                "LaunchTemplateId": version.template.id,
                "Version": str(version.number),
            },
            # A subnet determines the zone.
            "placement": None if subnet else pool.zone,
            "region_name": region,
            "subnet_id": subnet,
            "tags": {"instance": {}, **tags, "volume": {**volume_tags, **tags.get("volume", {})}},
        }
        if lifecycle == "spot":
            arguments["instance_market_options"] = "spot"
        if version.data.get("BlockDeviceMappings"):
            arguments["block_device_mappings"] = version.data["BlockDeviceMappings"]
        try:
            made = ec2_backends[ACCOUNT][region].run_instances("", 1, None, [], **arguments)
        except ServiceException as exc:
            raise ApiError(exc.code, exc.message) from None
        return str(made.instances[0].id)

    def source_of_image(self, region: str, image: str) -> str:
        """Return the instance from which an image was made; empty if there is none."""
        found = ec2_backends[ACCOUNT][region].amis.get(image)
        return str(found.instance_id or "") if found is not None else ""

    def is_image_source(self, region: str, instance_id: str) -> bool:
        """Return whether an image was made from an instance."""
        images = list(ec2_backends[ACCOUNT][region].amis.values())
        return any(one.instance_id == instance_id for one in images)

    def prepare(self, instance_id: str, address: str) -> InstanceFacts:
        """Give a new instance its address, and the template's settings that moto ignores.

        The instance is pending afterwards.
        """
        # moto starts instances as running, and applies only some of a launch template's settings.
        # The template is identified by the tags that EC2 adds to its instances.
        instance = self.find(instance_id)
        instance.nics[0].private_ip_address = address
        state = instance.instance_state
        state.name, state.code = "pending", 0
        tags = {tag["key"]: tag["value"] for tag in instance.get_tags()}
        data: dict[str, Any] = {}
        if f"{TEMPLATE_TAG}id" in tags:
            template = ec2_backends[ACCOUNT][instance.region_name].get_launch_template(
                tags[f"{TEMPLATE_TAG}id"]
            )
            data = template.get_version(tags[f"{TEMPLATE_TAG}version"]).data
        if data.get("InstanceInitiatedShutdownBehavior"):
            instance.instance_initiated_shutdown_behavior = data[
                "InstanceInitiatedShutdownBehavior"
            ]
        if data.get("MetadataOptions"):
            instance.metadata_options = MetadataOptions(data["MetadataOptions"])
        if (data.get("InstanceMarketOptions") or {}).get("MarketType") == "spot":
            instance.lifecycle = "spot"
        role = self._take_profile(instance, data.get("IamInstanceProfile") or {})
        return self._facts(instance, tags, role)

    def _take_profile(self, instance: Any, of_template: Mapping[str, Any]) -> str:
        # Associate the template's profile and return its role. If the request itself names a
        # profile, moto has already associated it, and it takes precedence.
        iam = iam_backends[ACCOUNT]["aws"]
        held = instance.ec2_backend.iam_instance_profile_associations.get(instance.id)
        if held is not None:
            profile = held.iam_instance_profile
        else:
            name = of_template.get("Name") or str(of_template.get("Arn", "")).rpartition("/")[2]
            if not name:
                return ""
            try:
                profile = iam.get_instance_profile(name)
            except ServiceException:
                return ""
            instance.ec2_backend.associate_iam_instance_profile(
                instance_id=instance.id, iam_instance_profile_name=name
            )
        return str(profile.roles[0].name) if profile.roles else ""

    def _facts(self, instance: Any, tags: Mapping[str, str], role: str) -> InstanceFacts:
        lifecycle: Lifecycle = "spot" if instance.lifecycle == "spot" else "on-demand"
        volumes = [block for _, block in instance.get_block_device_mapping]
        sizes = [int(instance.ec2_backend.volumes[block.volume_id].size or 8) for block in volumes]
        return InstanceFacts(
            instance_id=instance.id,
            pool=CapacityPool(instance.instance_type, instance.availability_zone),
            lifecycle=lifecycle,
            region=instance.region_name,
            image=instance.image_id or "",
            launched_at=instance.launch_time.replace(tzinfo=UTC).timestamp(),
            user_data=_decoded(instance.user_data),
            role=role,
            tags=tags,
            shows_tags=instance.metadata_options.instance_metadata_tags == "enabled",
            # EC2 does not stop one-time spot instances, so a shutdown from inside terminates them.
            stops=instance.instance_initiated_shutdown_behavior == "stop"
            and lifecycle == "on-demand",
            disk_gb=sum(sizes),
        )

    def set_running(self, instance_id: str) -> None:
        """Set an instance's state to running, unless it has already ended."""
        instance = self.find(instance_id)
        if instance.state == "pending":
            state = instance.instance_state
            state.name, state.code = "running", 16

    def set_ended(self, instance_id: str, code: str, *, is_stopped: bool = False) -> None:
        """Set an instance's state to terminated or stopped, with a reason."""
        instance = self.find(instance_id)
        if is_stopped:
            instance.stop()
        elif instance.state != "terminated":
            instance.terminate()
        instance.state_reason = StateReason(f"{code}: {_MESSAGES[code]}", code)

    # Roles and permissions ----------------------------------------------------------------------

    def role_credentials(self, role: str, session: str) -> str:
        """Return credentials of a role in the format of the metadata service."""
        # EC2 renews credentials five minutes before they expire; the short lifetimes in tests are
        # renewed halfway through.
        expires_at, document = self._credentials.get(session, (0.0, ""))
        if expires_at - time.time() > min(300, self.role_ttl_s / 2):
            return document
        # Credentials from moto's STS, so that moto's signature checks accept them.
        with self.lock:
            made = sts_backends[ACCOUNT]["aws"].assume_role(
                region_name="us-east-1",
                role_session_name=session,
                role_arn=f"arn:aws:iam::{ACCOUNT}:role/{role}",
                policy="",
                duration=self.role_ttl_s,
                external_id="",
            )
        expires_at = time.time() + self.role_ttl_s
        issued = {
            "Code": "Success",
            "LastUpdated": timestamp(time.time()),
            "Type": "AWS-HMAC",
            "AccessKeyId": made.access_key_id,
            "SecretAccessKey": made.secret_access_key,
            "Token": made.session_token,
            "Expiration": timestamp(expires_at),
        }
        self._credentials[session] = (expires_at, json.dumps(issued))
        return self._credentials[session][1]

    def _world(self, region: str) -> World:
        ec2 = ec2_backends[ACCOUNT][region]

        def template(named: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
            version = self.template(region, named)
            return str(version.template.id), version.data

        def role_of(profile: str) -> str:
            try:
                found = iam_backends[ACCOUNT]["aws"].get_instance_profile(profile)
            except ServiceException:
                return profile
            return str(found.roles[0].name) if found.roles else profile

        return World(
            tags_of=lambda id: ec2.tags.get(id, {}),
            template=template,
            role_of=role_of,
            owner_of=lambda id: str(ec2.amis[id].owner_id) if id in ec2.amis else "",
        )


def _decoded(user_data: Any) -> str:
    # moto has its own class for user data, which decodes base64.
    if not user_data:
        return ""
    try:
        return str(user_data.decode())
    except (AttributeError, ValueError):
        return str(user_data)
